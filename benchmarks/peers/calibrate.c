/* What this machine can do at this moment: reading memory, and multiply-adds in registers.
 *
 *     cc -O3 -march=native -ffast-math -pthread calibrate.c -o calibrate && ./calibrate THREADS
 *
 * Prints "GB/s GFLOP/s", each the best of some tries. Vector extensions of GCC and Clang instead of one machine's
 * intrinsics: the compiler makes of them what the machine has. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define LANES 16 /* floats: one register of AVX-512, two of AVX2, four of NEON */
#define CHAINS 12 /* independent accumulators, more than latency x ports of any core */
#define NUM_TRIES 5
#define BYTES_PER_THREAD ((size_t)256 << 20) /* far more than any cache gives one thread */
#define NUM_ROUNDS 4000000L

typedef float vector __attribute__((vector_size(LANES * sizeof(float)), aligned(LANES * sizeof(float))));

typedef struct {
    pthread_t thread;
    pthread_barrier_t *barrier;
    float *memory;
    double read_s, multiply_s; /* the best try */
    float sink;                /* so that nothing is optimised away */
} Worker;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static float total(const vector *sums) {
    float sum = 0;
    for (int k = 0; k < CHAINS; k++)
        for (int i = 0; i < LANES; i++) sum += sums[k][i];
    return sum;
}

static float read_all(const float *memory) {
    const vector *v = (const vector *)memory;
    vector sums[CHAINS] = {0};
    size_t count = BYTES_PER_THREAD / sizeof(vector) / CHAINS * CHAINS;
    for (size_t i = 0; i < count; i += CHAINS)
        for (int k = 0; k < CHAINS; k++) sums[k] += v[i + k];
    return total(sums);
}

static float multiply_add(float seed) {
    vector sums[CHAINS], factor, term;
    for (int i = 0; i < LANES; i++) factor[i] = 0.999f, term[i] = seed;
    for (int k = 0; k < CHAINS; k++) sums[k] = term + (float)k;
    for (long round = 0; round < NUM_ROUNDS; round++)
        for (int k = 0; k < CHAINS; k++) sums[k] = sums[k] * factor + term;
    return total(sums);
}

static void *run(void *argument) {
    Worker *w = argument;
    for (size_t i = 0; i < BYTES_PER_THREAD / sizeof(float); i++) w->memory[i] = 1;
    w->read_s = w->multiply_s = 1e9;
    for (int try = 0; try < NUM_TRIES; try++) {
        pthread_barrier_wait(w->barrier);
        double start = now();
        w->sink += read_all(w->memory);
        pthread_barrier_wait(w->barrier); /* the slowest thread counts */
        double middle = now();
        w->sink += multiply_add(1e-3f * (try + 1));
        pthread_barrier_wait(w->barrier);
        double end = now();
        if (middle - start < w->read_s) w->read_s = middle - start;
        if (end - middle < w->multiply_s) w->multiply_s = end - middle;
    }
    return NULL;
}

int main(int argc, char **argv) {
    int num_threads = argc > 1 ? atoi(argv[1]) : 1;
    if (num_threads < 1) return fprintf(stderr, "give the number of threads, at least 1\n"), 2;
    pthread_barrier_t barrier;
    pthread_barrier_init(&barrier, NULL, num_threads);
    Worker *workers = calloc(num_threads, sizeof *workers);
    for (int i = 0; i < num_threads; i++) {
        workers[i].barrier = &barrier;
        workers[i].memory = aligned_alloc(sizeof(vector), BYTES_PER_THREAD);
        if (!workers[i].memory) return fprintf(stderr, "not enough memory\n"), 1;
        pthread_create(&workers[i].thread, NULL, run, &workers[i]);
    }
    float sink = 0;
    for (int i = 0; i < num_threads; i++) pthread_join(workers[i].thread, NULL), sink += workers[i].sink;
    double bytes = (double)num_threads * BYTES_PER_THREAD, flops = 2.0 * num_threads * NUM_ROUNDS * CHAINS * LANES;
    printf("%.2f %.1f\n", bytes / workers[0].read_s / 1e9, flops / workers[0].multiply_s / 1e9);
    return sink == 0.5f; /* never, but the compiler does not know */
}
