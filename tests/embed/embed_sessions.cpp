// SPDX-License-Identifier: Apache-2.0
// Eight sessions at once: a thread for each, one engine for all, which computes their work in common steps. Prints the tokens of
// each, and fails if one differs from the same request made alone.
//
//   c++ -std=c++17 -pthread embed_sessions.cpp $(python -m hisparse_rt --cflags --libs) -o embed && ./embed MODEL.hsr 1 2 3
#include <cstdlib>
#include <exception>
#include <future>
#include <iostream>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <hisparse_rt/hisparse_rt.h>

namespace {

constexpr int n_sessions = 8;
using Ids = std::vector<int32_t>;

struct Close {
    void operator()(hsr_model *p) const { hsr_model_close(&p); }
    void operator()(hsr_engine *p) const { hsr_engine_destroy(&p, nullptr); }
    void operator()(hsr_session *p) const { hsr_session_destroy(&p, nullptr); }
};
template <typename T> using Handle = std::unique_ptr<T, Close>;

// Call f(args..., &err) and throw its text if it fails.
template <typename F, typename... Args> hsr_status call(F f, Args... args)
{
    hsr_error err = HSR_ERROR_INIT;
    const hsr_status status = f(args..., &err);
    if (status < 0)
        throw std::runtime_error(std::string(hsr_status_name(status)) + ": " + err.message);
    return status;
}

// Make a handle with f(args..., &handle, &err).
template <typename T, typename F, typename... Args> Handle<T> make(F f, Args... args)
{
    T *raw = nullptr;
    call(f, args..., &raw);
    return Handle<T>(raw);
}

Handle<hsr_engine> make_engine(hsr_model *model)
{
    hsr_engine_opts opts;
    hsr_engine_opts_init(&opts, sizeof opts);
    opts.n_threads = 2;
    return make<hsr_engine>(hsr_engine_create, model, &opts);
}

// Request `number` has the prompt turned by that many places; the odd ones are drawn, each from a seed of its own.
Ids generate(hsr_engine *engine, const Ids &ids, int number)
{
    auto session = make<hsr_session>(hsr_session_create, engine, nullptr);
    Ids prompt(ids);
    for (size_t i = 0; i < ids.size(); i++)
        prompt[i] = ids[(i + static_cast<size_t>(number)) % ids.size()];
    call(hsr_session_append, session.get(), prompt.data(), static_cast<uint64_t>(prompt.size()));

    hsr_request request;
    hsr_request_init(&request, sizeof request);
    request.max_tokens = 16 + number;
    request.ignore_eos = 1;
    request.temperature = number % 2 ? 1.0f : 0.0f;
    request.seed = static_cast<uint64_t>(number);
    call(hsr_session_generate, session.get(), &request);

    Ids out;
    hsr_event event = {};
    event.struct_size = sizeof event;
    while (call(hsr_session_next, session.get(), &event) == HSR_OK) {
        if (event.kind == HSR_EVENT_TOKEN)
            out.push_back(event.token);
        else if (event.kind == HSR_EVENT_FAILED)
            throw std::runtime_error(hsr_status_name(event.status));
    }
    return out;
}

std::vector<Ids> generate_at_once(hsr_engine *engine, const Ids &ids)
{
    std::vector<std::future<Ids>> running;
    std::vector<Ids> out;
    for (int i = 0; i < n_sessions; i++)
        running.push_back(std::async(std::launch::async, generate, engine, std::cref(ids), i));
    for (auto &one : running)
        out.push_back(one.get());
    return out;
}

} // namespace

int main(int argc, char **argv)
try {
    if (argc < 3)
        throw std::runtime_error("usage: embed_sessions MODEL.hsr ID...");
    Ids ids;
    for (int i = 2; i < argc; i++)
        ids.push_back(std::atoi(argv[i]));

    auto model = make<hsr_model>(hsr_model_open, argv[1]);
    auto engine = make_engine(model.get());
    const std::vector<Ids> together = generate_at_once(engine.get(), ids);
    for (int i = 0; i < n_sessions; i++) {
        const size_t number = static_cast<size_t>(i);
        for (int32_t id : together[number])
            std::cout << id << ' ';
        std::cout << '\n';
        if (together[number] != generate(make_engine(model.get()).get(), ids, i))
            throw std::runtime_error("session " + std::to_string(i) + " differs from the same request alone");
    }
    return 0;
} catch (const std::exception &e) {
    std::cerr << e.what() << '\n';
    return 1;
}
