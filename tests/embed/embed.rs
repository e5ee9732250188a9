// SPDX-License-Identifier: Apache-2.0
// The smallest host in Rust, without crates: declares the few functions it uses and lets the library fill its structs.
use std::ffi::{c_char, c_void, CStr, CString};
use std::ptr;

#[repr(C)]
struct Error { struct_size: u32, status: i32, sys_code: i32, message: [c_char; 500] }

#[repr(C)]
struct Request {
    struct_size: u32, max_tokens: i32, temperature: f32, top_k: i32, top_p: f32, min_p: f32,
    repetition_penalty: f32, presence_penalty: f32, frequency_penalty: f32, penalty_window: i32,
    seed: u64, bias: *const c_void, n_bias: u32, n_stop: u32, stop: *const i32, ignore_eos: i32, n_logprobs: i32,
}

#[repr(C)]
struct Logprob { token: i32, logprob: f32 }

#[repr(C)]
struct Event {
    struct_size: u32, kind: i32, session: *mut c_void, user: *mut c_void, token: i32, reason: i32, status: i32,
    logprob: f32, position: i64, n_logprobs: i32, logprobs: [Logprob; 20],
}

extern "C" {
    fn hsr_status_name(status: i32) -> *const c_char;
    fn hsr_model_open(path: *const c_char, model: *mut *mut c_void, err: *mut Error) -> i32;
    fn hsr_model_close(model: *mut *mut c_void);
    fn hsr_engine_create(model: *mut c_void, opts: *const c_void, engine: *mut *mut c_void, err: *mut Error) -> i32;
    fn hsr_engine_destroy(engine: *mut *mut c_void, err: *mut Error) -> i32;
    fn hsr_session_create(engine: *mut c_void, opts: *const c_void, session: *mut *mut c_void, err: *mut Error) -> i32;
    fn hsr_session_destroy(session: *mut *mut c_void, err: *mut Error) -> i32;
    fn hsr_session_append(session: *mut c_void, ids: *const i32, n: u64, err: *mut Error) -> i32;
    fn hsr_request_init(request: *mut Request, struct_size: u32);
    fn hsr_session_generate(session: *mut c_void, request: *const Request, err: *mut Error) -> i32;
    fn hsr_session_next(session: *mut c_void, event: *mut Event, err: *mut Error) -> i32;
}

const TOKEN: i32 = 1;
const FINISHED: i32 = 2;

fn check(status: i32, err: &Error) {
    if status < 0 {
        let (name, text) = unsafe { (CStr::from_ptr(hsr_status_name(status)), CStr::from_ptr(err.message.as_ptr())) };
        eprintln!("{}: {}", name.to_string_lossy(), text.to_string_lossy());
        std::process::exit(1);
    }
}

fn main() {
    let mut args = std::env::args().skip(1);
    let path = CString::new(args.next().expect("usage: embed MODEL.hsr ID...")).unwrap();
    let ids: Vec<i32> = args.map(|a| a.parse().expect("a token id")).collect();
    let (mut model, mut engine, mut session) = (ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
    unsafe {
        let mut err: Error = std::mem::zeroed();
        err.struct_size = std::mem::size_of::<Error>() as u32;
        check(hsr_model_open(path.as_ptr(), &mut model, &mut err), &err);
        check(hsr_engine_create(model, ptr::null(), &mut engine, &mut err), &err);
        check(hsr_session_create(engine, ptr::null(), &mut session, &mut err), &err);
        check(hsr_session_append(session, ids.as_ptr(), ids.len() as u64, &mut err), &err);
        let mut request: Request = std::mem::zeroed();
        hsr_request_init(&mut request, std::mem::size_of::<Request>() as u32);
        request.max_tokens = 16;
        request.ignore_eos = 1;
        check(hsr_session_generate(session, &request, &mut err), &err);
        let mut event: Event = std::mem::zeroed();
        event.struct_size = std::mem::size_of::<Event>() as u32;
        while event.kind != FINISHED {
            check(hsr_session_next(session, &mut event, &mut err), &err);
            check(event.status, &err);
            if event.kind == TOKEN {
                print!("{} ", event.token);
            }
        }
        println!();
        hsr_session_destroy(&mut session, ptr::null_mut());
        hsr_engine_destroy(&mut engine, ptr::null_mut());
        hsr_model_close(&mut model);
    }
}
