// The threads of one step: one OpenMP region around the whole forward pass, whose stages share their items out. torch loads the
// same OpenMP library, so its threads and these are the same ones.
//
// A stage ends when its items are done, not when all threads have come: one that another process keeps from running holds up
// nobody, unless it was in the middle of an item. When it comes back it finds nothing left in the stages that it missed. So a
// stage's code outside `work` must have no effect.
#pragma once
#include "simd.h"

extern "C" int sched_yield();

namespace {

constexpr int kStageCounters = 32;  // two cache lines for each stage: items given out, items done
constexpr int kSpins = 4000;        // tens of microseconds, longer than an undisturbed stage's imbalance

struct Team {
  int rank, size;
  int32_t* counters;  // zeroed; kStageCounters for each stage of a step
  uint8_t* scratch;   // this thread's own
  int stage = 0;

  // Run `work(item)` for all items, and return when all are done. Whoever is free takes the next run of them, ever shorter ones:
  // neighbours share memory that one of them has fetched, and the last runs even out what other processes took.
  template <class Work>
  void share(int items, Work work) {
    if (size == 1) {
      for (int item = 0; item < items; item++) work(item);
      return;
    }
    int32_t* given = counters + kStageCounters * stage++;
    int32_t* done = given + kStageCounters / 2;
    int begin = __atomic_load_n(given, __ATOMIC_RELAXED);
    while (begin < items) {
      int run = max_of(1, (items - begin) / (2 * size));
      if (!__atomic_compare_exchange_n(given, &begin, begin + run, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) continue;
      for (int item = begin; item < begin + run; item++) work(item);
      __atomic_fetch_add(done, run, __ATOMIC_RELEASE);
      begin = __atomic_load_n(given, __ATOMIC_RELAXED);
    }
    for (int spins = 0; __atomic_load_n(done, __ATOMIC_ACQUIRE) < items; spins++) {
      if (spins >= kSpins) sched_yield();
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
  }
};

}  // namespace
