// A small pool of threads that stays: starting threads for every matmul would cost more than the matmul.
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#include "common.h"
#if !defined(_WIN32)
#include <unistd.h>
#endif

namespace gq {
namespace {

constexpr int SPINS = 300;  // some 10 to 20 microseconds; then a thread sleeps

inline void pause() {
#if GQ_X86
    _mm_pause();
#endif
}

struct Job {
    void (*run)(void*, int64_t);
    void* context;
    int64_t items;
    std::atomic<int64_t> next{0};
    std::atomic<bool> failed{false};

    // No exception leaves it: the other threads use this job until they are done, and a thread of the pool would end the
    // process.
    void work() {
        try {
            for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < items;) run(context, i);
        } catch (...) {
            failed = true;
            next.store(items, std::memory_order_relaxed);
        }
    }
};

class Pool {
   public:
    std::mutex call;  // one job at a time

    void run(int helpers, Job& job) {
        grow(helpers);
        {
            std::lock_guard<std::mutex> lock(mutex_);
            job_ = &job;
            seats_ = helpers;
            ++number_;
        }
        helpers == 1 ? wake_.notify_one() : wake_.notify_all();
        job.work();
        for (int i = 0; i < SPINS && active_.load(std::memory_order_acquire); ++i) pause();
        std::unique_lock<std::mutex> lock(mutex_);
        job_ = nullptr;  // who comes late finds nothing
        idle_.wait(lock, [this] { return active_ == 0; });
    }

   private:
    void grow(int helpers) {
        for (; threads_ < helpers; ++threads_) {
            try {
                std::thread([this] { serve(); }).detach();
            } catch (const std::system_error&) {
                return;  // fewer threads do the same work
            }
        }
    }

    void serve() {
        uint64_t seen = 0;
        for (;;) {
            for (int i = 0; i < SPINS && number_.load(std::memory_order_acquire) == seen; ++i) pause();
            std::unique_lock<std::mutex> lock(mutex_);
            wake_.wait(lock, [&] { return job_ && number_ != seen; });
            seen = number_;
            if (seats_ == 0) continue;
            --seats_;
            ++active_;
            Job* job = job_;
            lock.unlock();
            job->work();
            lock.lock();
            if (--active_ == 0) idle_.notify_all();
        }
    }

    std::mutex mutex_;
    std::condition_variable wake_, idle_;
    Job* job_ = nullptr;
    int seats_ = 0;
    int threads_ = 0;
    std::atomic<int> active_{0};
    std::atomic<uint64_t> number_{0};
};

// Never destroyed, since its threads never end; a forked child has none of them and takes a new pool.
Pool* current() {
    static std::mutex guard;
    static Pool* pool = nullptr;
#if defined(_WIN32)
    const long here = 1;
#else
    const long here = static_cast<long>(getpid());
#endif
    static long owner = 0;
    std::lock_guard<std::mutex> lock(guard);
    if (owner != here) {
        pool = new Pool;
        owner = here;
    }
    return pool;
}

}  // namespace

void parallel(int threads, int64_t items, void (*run)(void*, int64_t), void* context) {
    Job job{run, context, items};
    if (threads > items) threads = static_cast<int>(items);
    if (threads > 1) {
        Pool* pool = current();
        std::unique_lock<std::mutex> turn(pool->call, std::try_to_lock);
        if (turn.owns_lock()) {
            pool->run(threads - 1, job);
            if (job.failed) throw std::bad_alloc();
            return;
        }
    }
    job.work();  // alone: asked for one thread, or the pool serves another caller
    if (job.failed) throw std::bad_alloc();
}

}  // namespace gq
