// Threads that take chunks of work as they come, and sleep when there is none.
//
// No thread waits for another that holds no chunk, so one that the system has taken from its core delays
// nobody but through the chunk that it holds. Waiting spins for some microseconds and then sleeps.
#include "native.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <new>
#include <pthread.h>
#include <stdlib.h>
#include <thread>
#include <vector>

thread_local void (*at_end)() = nullptr;

// What stands before the memory of a Scratch.
struct alignas(64) Piece {
    Piece* next;
    int power;
};

namespace {

constexpr int MOST_STAGES = 1024, MOST_LANES = 8;

void end_part() {
    if (at_end) at_end();
    at_end = nullptr;
}

// How long a thread that waits stays awake: to be woken takes a core that sleeps 50 to 100 us, and between the
// passes of two steps lie one or two milliseconds. One that loses its core meanwhile, because others want
// it, falls asleep soon the next WARNED times, and then waits longer each time that work comes early.
typedef std::chrono::steady_clock Clock;
constexpr Clock::duration SHORTEST = std::chrono::microseconds(40), LONGEST = std::chrono::microseconds(2500);
constexpr Clock::duration LOST = std::chrono::microseconds(300);
constexpr int WARNED = 32;

inline int lanes_of(int threads) { return threads < MOST_LANES ? threads : MOST_LANES; }

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// The chunks of a stage lie in lanes, one after the other. A thread begins with its own lane, so that what it
// reads lies in one piece and can be fetched ahead, and goes on with what the others have left.
//
// Counters carry the job's number in their upper half: a thread that comes late changes nothing of the
// next job, and reads nothing of a job before it has taken one of its chunks.
//
// A lane's counter has a cache line to itself, and a thread says once what it has done in a lane: a line that two
// cores write takes as long to move as a small chunk takes to compute.
struct alignas(64) Lane {
    std::atomic<uint64_t> next{0};
};
struct Stage {
    Lane lanes[MOST_LANES];
    alignas(64) std::atomic<uint64_t> done{0};
    std::atomic<uint32_t> total{0};
};

class Pool {
public:
    explicit Pool(int threads) { start(threads - 1); }

    ~Pool() {
        {
            std::lock_guard<std::mutex> hold(mutex_);
            ending_ = true;
        }
        wake_.notify_all();
        for (auto& one : workers_) one.join();
    }

    int threads() const { return int(workers_.size()) + 1; }

    void run(const Job& job) {
        uint64_t number = number_ + 1;
        job_ = &job;
        int lanes = lanes_of(threads());
        for (int s = 0; s < job.stages; ++s) expect_counters(s, 0, lanes);
        for (int s = 0; s < job.stages; ++s) {
            int total = job.chunks(job.self, s);
            for (int l = 0; l < lanes; ++l)
                stages_[s].lanes[l].next.store(number << 32 | uint32_t(lane_start(total, l, lanes)),
                                               std::memory_order_release);
            stages_[s].done.store(number << 32, std::memory_order_release);
            stages_[s].total.store(uint32_t(total), std::memory_order_release);
        }
        count_.store(job.stages);
        number_.store(number);
        signal();
        follow(number, 0);
        end_part();
    }

private:
    void start(int extra) {
        for (int i = 0; i < extra; ++i) workers_.emplace_back([this, i] { serve(i + 1); });
    }

    void serve(int thread) {
        uint64_t last = 0;
        for (;;) {
            await([&] { return ending_.load() || number_.load() != last; });
            if (ending_) return;
            last = number_.load();
            follow(last, thread);
            end_part();
        }
    }

    // Go through the stages of a job, taking chunks.
    void follow(uint64_t number, int thread) {
        int stages = count_.load(), lanes = lanes_of(threads());
        for (int s = 0; s < stages; ++s) {
            uint64_t wanted = (number << 32) | uint32_t(s + 1);
            if (s + 1 < stages) expect_counters(s + 1, thread % lanes, thread % lanes + 1);
            for (int i = 0; i < lanes && (i == 0 || progress_.load() < wanted); ++i)
                if (!drain(number, s, (thread + i) % lanes, lanes)) return;
            await([&] { return progress_.load() >= wanted; });
        }
    }

    // Ask for the counters of a stage, which another core has written last.
    void expect_counters(int s, int from, int to) {
        for (int l = from; l < to; ++l) expect(&stages_[s].lanes[l], sizeof(Lane), true);
        expect(&stages_[s].done, 1, true);
    }

    // Take a lane's chunks; false when the job is over.
    bool drain(uint64_t number, int s, int lane, int lanes) {
        Stage& stage = stages_[s];
        std::atomic<uint64_t>& next = stage.lanes[lane].next;
        int total = int(stage.total.load()), end = lane_start(total, lane + 1, lanes), mine = 0;
        for (;;) {
            uint64_t at = next.load();
            if (at >> 32 != number) return false;  // none of these chunks is missing, so that none is mine
            if (int(uint32_t(at)) >= end) break;
            if (!next.compare_exchange_weak(at, at + 1)) continue;
            const Job& job = *job_;
            job.work(job.self, s, int(uint32_t(at)));
            ++mine;
        }
        if (!mine || int(uint32_t(stage.done.fetch_add(uint64_t(mine)))) + mine != total) return true;
        const Job& job = *job_;
        if (job.tail) job.tail(job.self, s);
        progress_.store((number << 32) | uint32_t(s + 1));
        signal();
        return true;
    }

    template <class Ready> void await(Ready ready) {
        static thread_local Clock::duration patience = LONGEST;
        static thread_local int warned = 0;
        if (ready()) return;
        auto begin = Clock::now(), now = begin;
        do {
            for (int i = 0; i < 32; ++i) {
                if (ready()) return;
                pause();
            }
            auto last = now;
            now = Clock::now();
            if (now - last > LOST) patience = SHORTEST, warned = WARNED;
        } while (now - begin < patience);
        std::unique_lock<std::mutex> hold(mutex_);
        sleepers_.fetch_add(1);
        wake_.wait(hold, ready);
        sleepers_.fetch_sub(1);
        if (warned > 0)
            --warned;
        else if (Clock::now() - begin < LONGEST)
            patience = std::min(2 * patience, LONGEST);
    }

    void signal() {
        if (!sleepers_.load()) return;
        { std::lock_guard<std::mutex> hold(mutex_); }
        wake_.notify_all();
    }

    Stage stages_[MOST_STAGES];
    std::atomic<uint64_t> number_{0}, progress_{0};
    std::atomic<int> count_{0}, sleepers_{0};
    std::atomic<bool> ending_{false};
    std::atomic<const Job*> job_{nullptr};
    std::mutex mutex_;
    std::condition_variable wake_;
    std::vector<std::thread> workers_;
};

std::mutex busy;
Pool* pool = nullptr;
int wanted = 1;

// A child of a fork has none of its parent's threads, and may have the lock of one of them.
void begin_in_child() {
    new (&busy) std::mutex;
    pool = nullptr;
}

void alone_run(const Job& job) {
    for (int s = 0; s < job.stages; ++s) {
        int total = job.chunks(job.self, s);
        for (int c = 0; c < total; ++c) job.work(job.self, s, c);
        if (job.tail) job.tail(job.self, s);
    }
    end_part();
}

constexpr int SMALLEST = 12, SIZES = 48;  // powers of two, in bytes

// What a thread has given back, by size, and whether it is ending: then nothing is kept.
thread_local Piece* spare[SIZES];
thread_local bool ended = false;

struct Ending {
    ~Ending() {
        ended = true;
        for (Piece*& first : spare)
            while (Piece* piece = first) {
                first = piece->next;
                free(piece);
            }
    }
};

}  // namespace

void pool_resize(int threads) { wanted = threads < 1 ? 1 : threads; }
int pool_threads() { return wanted; }
int pool_lanes() { return lanes_of(wanted); }

void pool_run(const Job& job, bool alone) {
    if (alone || wanted == 1 || job.stages > MOST_STAGES || !busy.try_lock()) {
        alone_run(job);
        return;
    }
    std::lock_guard<std::mutex> hold(busy, std::adopt_lock);
    static const int told = pthread_atfork(nullptr, nullptr, begin_in_child);
    (void)told;
    if (pool && pool->threads() != wanted) {
        delete pool;
        pool = nullptr;
    }
    if (!pool) pool = new Pool(wanted);
    pool->run(job);
}

void* Scratch::bytes(size_t size) {
    static thread_local Ending at_end;
    (void)&at_end;
    int power = SMALLEST;
    while ((size_t(1) << power) < size + sizeof(Piece)) ++power;
    Piece* piece = spare[power];
    if (piece) {
        spare[power] = piece->next;
    } else {
        piece = static_cast<Piece*>(aligned_alloc(64, size_t(1) << power));
        if (!piece) abort();
        piece->power = power;
    }
    piece->next = pieces_;
    pieces_ = piece;
    return piece + 1;
}

void Scratch::clear() {
    while (Piece* piece = pieces_) {
        pieces_ = piece->next;
        if (ended) {
            free(piece);
            continue;
        }
        piece->next = spare[piece->power];
        spare[piece->power] = piece;
    }
}
