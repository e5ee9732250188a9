// SPDX-License-Identifier: Apache-2.0
// The smallest complete host in C++: the same as embed.c, with the handles owned by unique_ptr and failures thrown.
//
//   c++ -std=c++17 embed.cpp $(python -m hisparse_rt --cflags --libs) -o embed && ./embed MODEL.hsr 1 2 3
#include <cstdlib>
#include <iostream>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <hisparse_rt/hisparse_rt.h>

namespace {

struct Close {
    void operator()(hsr_model *p) const { hsr_model_close(&p); }
    void operator()(hsr_engine *p) const { hsr_engine_destroy(&p, nullptr); }
    void operator()(hsr_session *p) const { hsr_session_destroy(&p, nullptr); }
};
template <typename T> using Handle = std::unique_ptr<T, Close>;

// Call f(args..., &err) and throw its text if it fails.
template <typename F, typename... Args> void call(F f, Args... args)
{
    hsr_error err = HSR_ERROR_INIT;
    if (f(args..., &err) < 0)
        throw std::runtime_error(std::string(hsr_status_name(err.status)) + ": " + err.message);
}

// Make a handle with f(args..., &handle, &err).
template <typename T, typename F, typename... Args> Handle<T> make(F f, Args... args)
{
    T *raw = nullptr;
    call(f, args..., &raw);
    return Handle<T>(raw);
}

std::vector<int32_t> generate(hsr_engine *engine, const std::vector<int32_t> &ids, int32_t max_tokens)
{
    auto session = make<hsr_session>(hsr_session_create, engine, nullptr);
    call(hsr_session_append, session.get(), ids.data(), static_cast<uint64_t>(ids.size()));

    hsr_request request;
    hsr_request_init(&request, sizeof request);
    request.max_tokens = max_tokens;
    request.ignore_eos = 1;
    call(hsr_session_generate, session.get(), &request);

    std::vector<int32_t> out;
    hsr_event event = {};
    event.struct_size = sizeof event;
    while (event.kind != HSR_EVENT_FINISHED) {
        call(hsr_session_next, session.get(), &event);
        if (event.kind == HSR_EVENT_TOKEN)
            out.push_back(event.token);
        else if (event.kind == HSR_EVENT_FAILED)
            throw std::runtime_error(hsr_status_name(event.status));
    }
    return out;
}

} // namespace

int main(int argc, char **argv)
try {
    if (argc < 3)
        throw std::runtime_error("usage: embed MODEL.hsr ID...");
    std::vector<int32_t> ids;
    for (int i = 2; i < argc; i++)
        ids.push_back(std::atoi(argv[i]));

    auto model = make<hsr_model>(hsr_model_open, argv[1]);
    hsr_engine_opts opts;
    hsr_engine_opts_init(&opts, sizeof opts);
    opts.n_threads = 2;
    auto engine = make<hsr_engine>(hsr_engine_create, model.get(), &opts);
    for (int32_t id : generate(engine.get(), ids, 16))
        std::cout << id << ' ';
    std::cout << '\n';
    return 0;
} catch (const std::exception &e) {
    std::cerr << e.what() << '\n';
    return 1;
}
