/* Bytes per second that THREADS threads read together: a sum over 512 MiB, best of several passes.
   Usage: read_bandwidth THREADS PASSES */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { BYTES = 512 << 20, MOST_THREADS = 256 };
static uint64_t *data;
static size_t threads, share;
static volatile uint64_t sink;

static void *read_share(void *index) {
    const uint64_t *from = data + (size_t)index * share;
    uint64_t sum = 0;
    for (size_t i = 0; i < share; i++) sum += from[i];
    sink = sum;
    return NULL;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

int main(int argc, char **argv) {
    threads = argc == 3 ? strtoul(argv[1], NULL, 10) : 0;
    if (threads < 1 || threads > MOST_THREADS || !(data = malloc(BYTES))) return 2;
    memset(data, 1, BYTES);
    share = BYTES / sizeof *data / threads;
    double best = 0;
    for (long pass = strtol(argv[2], NULL, 10); pass > 0; pass--) {
        pthread_t running[MOST_THREADS];
        double began = now();
        for (size_t i = 0; i < threads; i++)
            if (pthread_create(&running[i], NULL, read_share, (void *)i)) return 3;
        for (size_t i = 0; i < threads; i++) pthread_join(running[i], NULL);
        double rate = (double)(share * threads * sizeof *data) / (now() - began);
        best = rate > best ? rate : best;
    }
    printf("%.0f\n", best);
    return 0;
}
