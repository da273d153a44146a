// A small pool of threads. A job runs on all of them at once, in step: barriers, and work that is claimed in pieces.
#pragma once
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace anaphora {

class Pool;

// What one thread of a running job sees.
class Worker {
  public:
    const int index;
    const int size;

    // Every thread waits for the others. Afterwards all work counts as unclaimed again.
    void barrier();

    // One of the pieces 0 .. pieces - 1 that no thread has claimed since the last barrier, or -1. A thread gets those
    // of its own share first, in order (what it streams from memory stays in sequence), then helps the others.
    int claim(int pieces);

  private:
    friend class Pool;
    Worker(Pool &pool, int index, int size) : index(index), size(size), pool_(pool) {}
    int share(int pieces, int owner) const { return static_cast<int>(static_cast<long>(pieces) * owner / size); }
    Pool &pool_;
};

class Pool {
  public:
    using Job = std::function<void(Worker &)>;

    // The caller of run() is one of the `threads`.
    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool &) = delete;
    Pool &operator=(const Pool &) = delete;

    int size() const { return size_; }

    // Run the job once on every thread and return when all have ended. One job at a time: further callers wait.
    void run(const Job &job);

  private:
    friend class Worker;
    struct alignas(64) Counter {
        std::atomic<int> value{0};
    };
    bool arrive(int &epoch);
    void wait(int epoch);
    void serve(int index);

    const int size_;
    std::unique_ptr<Counter[]> claimed_;  // per thread: pieces of its share that are taken
    Counter arrived_;
    Counter epoch_;       // barriers that are passed
    Counter generation_;  // jobs that were begun
    std::atomic<bool> ends_{false};
    const Job *job_ = nullptr;
    std::mutex one_job_;
    std::vector<std::thread> threads_;
};

// The process's pool. After a fork the child gets one of its own.
std::shared_ptr<Pool> pool();

// How many threads pool() has; takes effect with the next job.
void set_threads(int threads);

}  // namespace anaphora
