/* A team of threads for loops of microseconds.
 *
 * Tasks are not dealt out but taken, so a thread that gets no CPU delays nobody: the others take its share. Between
 * loops a thread looks for work for some tens of microseconds, which spans the gaps within a step, and then sleeps.
 */
#define _GNU_SOURCE
#include "surefoot.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>

#define SPINS 2000           /* looks for work before a thread sleeps; some 20 to 80 us */
#define SPINS_OF_OWNER 20000 /* looks for the end of others' tasks before the owner lets others have its CPU */

struct pool {
    /* Upper half: number of the loop; lower half: its tasks that nobody has taken. While a loop's number stands and it
     * has tasks left, `function`, `args` and `tasks` are those of the loop. */
    _Atomic uint64_t ticket;
    atomic_int unfinished; /* tasks of the loop that have not ended */
    task_function *function;
    const void *args;
    int tasks;

    void *scratch;
    int64_t scratch_bytes;

    int threads;
    pthread_t *workers;
    pthread_mutex_t mutex;
    pthread_cond_t wake;
    atomic_int sleepers;
    atomic_bool closing;
};

struct worker {
    struct pool *pool;
    int thread;
};

static void pause_a_little(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static uint32_t untaken(uint64_t ticket) { return (uint32_t)ticket; }

static void take_tasks(struct pool *pool, int thread) {
    uint64_t ticket = atomic_load_explicit(&pool->ticket, memory_order_acquire);
    while (untaken(ticket) > 0) {
        /* If the exchange succeeds, no other loop has begun since `ticket` was read. */
        if (!atomic_compare_exchange_weak_explicit(
                &pool->ticket, &ticket, ticket - 1, memory_order_acq_rel, memory_order_acquire))
            continue;
        pool->function(pool->args, pool->tasks - (int)untaken(ticket), thread);
        atomic_fetch_sub_explicit(&pool->unfinished, 1, memory_order_release);
        ticket = atomic_load_explicit(&pool->ticket, memory_order_acquire);
    }
}

static void sleep_until_work(struct pool *pool) {
    pthread_mutex_lock(&pool->mutex);
    atomic_fetch_add(&pool->sleepers, 1);
    while (untaken(atomic_load(&pool->ticket)) == 0 && !atomic_load(&pool->closing))
        pthread_cond_wait(&pool->wake, &pool->mutex);
    atomic_fetch_sub(&pool->sleepers, 1);
    pthread_mutex_unlock(&pool->mutex);
}

static void wake_sleepers(struct pool *pool) {
    if (atomic_load(&pool->sleepers) > 0) {
        pthread_mutex_lock(&pool->mutex);
        pthread_cond_broadcast(&pool->wake);
        pthread_mutex_unlock(&pool->mutex);
    }
}

static void *work(void *argument) {
    struct worker worker = *(struct worker *)argument;
    free(argument);
    struct pool *pool = worker.pool;
    int idle = 0;
    while (!atomic_load_explicit(&pool->closing, memory_order_relaxed)) {
        if (untaken(atomic_load_explicit(&pool->ticket, memory_order_relaxed)) > 0) {
            take_tasks(pool, worker.thread);
            idle = 0;
        } else if (++idle < SPINS) {
            pause_a_little();
        } else {
            sleep_until_work(pool);
            idle = 0;
        }
    }
    return NULL;
}

/* NULL if the system has no memory for it. With fewer threads than asked for, if it has none. */
struct pool *pool_create(int threads) {
    struct pool *pool = calloc(1, sizeof *pool);
    pthread_t *workers = calloc(threads, sizeof *workers);
    if (!pool || !workers) {
        free(pool);
        free(workers);
        return NULL;
    }
    pool->workers = workers;
    pool->threads = 1;
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->wake, NULL);
    while (pool->threads < threads) {
        struct worker *worker = malloc(sizeof *worker);
        if (!worker) break;
        *worker = (struct worker){pool, pool->threads};
        if (pthread_create(&workers[pool->threads - 1], NULL, work, worker)) {
            free(worker);
            break;
        }
        pool->threads++;
    }
    return pool;
}

void pool_destroy(struct pool *pool) {
    pthread_mutex_lock(&pool->mutex);
    atomic_store(&pool->closing, true);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->mutex);
    for (int worker = 0; worker < pool->threads - 1; worker++) pthread_join(pool->workers[worker], NULL);
    pthread_mutex_destroy(&pool->mutex);
    pthread_cond_destroy(&pool->wake);
    free(pool->scratch);
    free(pool->workers);
    free(pool);
}

int pool_threads(const struct pool *pool) { return pool->threads; }

void *pool_scratch(struct pool *pool, int64_t bytes) {
    if (bytes > pool->scratch_bytes) {
        free(pool->scratch);
        pool->scratch_bytes = (bytes + 63) / 64 * 64;
        pool->scratch = aligned_alloc(64, pool->scratch_bytes);
        if (!pool->scratch) pool->scratch_bytes = 0;
    }
    return pool->scratch;
}

void parallel_for(struct pool *pool, int tasks, task_function *function, const void *args) {
    if (tasks == 1 || pool->threads == 1) {
        for (int task = 0; task < tasks; task++) function(args, task, 0);
        return;
    }
    if (tasks <= 0) return;
    pool->function = function;
    pool->args = args;
    pool->tasks = tasks;
    atomic_store_explicit(&pool->unfinished, tasks, memory_order_relaxed);
    uint64_t loop = (atomic_load_explicit(&pool->ticket, memory_order_relaxed) >> 32) + 1;
    atomic_store(&pool->ticket, loop << 32 | (uint32_t)tasks);
    wake_sleepers(pool);
    take_tasks(pool, 0);
    for (int spins = 0; atomic_load_explicit(&pool->unfinished, memory_order_acquire) > 0; spins++) {
        if (spins < SPINS_OF_OWNER)
            pause_a_little();
        else
            sched_yield();
    }
}
