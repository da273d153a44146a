#include "pool.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>

namespace anaphora {
namespace {

// Longer than any gap within a step, far shorter than a time slice: the server's own threads want the cores too.
constexpr auto kSpin = std::chrono::microseconds(50);

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Until `value` is no longer `old`: at first awake, then asleep.
void wait_while(std::atomic<int> &value, int old) {
    const auto begin = std::chrono::steady_clock::now();
    do {
        for (int i = 0; i < 64; ++i) {
            if (value.load(std::memory_order_acquire) != old) return;
            pause();
        }
    } while (std::chrono::steady_clock::now() - begin < kSpin);
    value.wait(old, std::memory_order_acquire);
}

std::mutex pool_mutex;
std::shared_ptr<Pool> current;
pid_t owner = 0;
int wanted = 0;

}  // namespace

void Worker::barrier() {
    int epoch;
    if (!pool_.arrive(epoch)) pool_.wait(epoch);
}

int Worker::claim(int pieces) {
    for (int step = 0; step < size; ++step) {
        const int of = (index + step) % size;
        const int first = share(pieces, of), count = share(pieces, of + 1) - first;
        std::atomic<int> &taken = pool_.claimed_[of].value;
        if (taken.load(std::memory_order_relaxed) >= count) continue;  // no write to a line that others read
        const int mine = taken.fetch_add(1, std::memory_order_relaxed);
        if (mine < count) return first + mine;
    }
    return -1;
}

Pool::Pool(int threads) : size_(std::max(1, threads)), claimed_(new Counter[size_]) {
    for (int index = 1; index < size_; ++index) threads_.emplace_back([this, index] { serve(index); });
}

Pool::~Pool() {
    ends_ = true;
    generation_.value.fetch_add(1, std::memory_order_release);
    generation_.value.notify_all();
    for (std::thread &thread : threads_) thread.join();
}

void Pool::run(const Job &job) {
    std::lock_guard lock(one_job_);
    job_ = &job;
    generation_.value.fetch_add(1, std::memory_order_release);
    if (size_ > 1) generation_.value.notify_all();
    Worker worker(*this, 0, size_);
    job(worker);
    worker.barrier();
}

void Pool::serve(int index) {
    for (int seen = 0;; ++seen) {
        wait_while(generation_.value, seen);
        if (ends_) return;
        Worker worker(*this, index, size_);
        (*job_)(worker);
        worker.barrier();
    }
}

// True for the last one, who opens the barrier.
bool Pool::arrive(int &epoch) {
    epoch = epoch_.value.load(std::memory_order_relaxed);
    if (arrived_.value.fetch_add(1, std::memory_order_acq_rel) + 1 < size_) return false;
    arrived_.value.store(0, std::memory_order_relaxed);
    for (int i = 0; i < size_; ++i) claimed_[i].value.store(0, std::memory_order_relaxed);
    epoch_.value.store(epoch + 1, std::memory_order_release);
    if (size_ > 1) epoch_.value.notify_all();
    return true;
}

void Pool::wait(int epoch) { wait_while(epoch_.value, epoch); }

std::shared_ptr<Pool> pool() {
    std::lock_guard lock(pool_mutex);
    const pid_t self = getpid();
    if (current && owner != self) new std::shared_ptr<Pool>(std::move(current));  // its threads stayed in the parent
    if (!current || (wanted > 0 && current->size() != wanted)) {
        current = std::make_shared<Pool>(wanted > 0 ? wanted : static_cast<int>(std::thread::hardware_concurrency()));
        owner = self;
    }
    return current;
}

void set_threads(int threads) {
    std::lock_guard lock(pool_mutex);
    wanted = threads;
}

}  // namespace anaphora
