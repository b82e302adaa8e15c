// Loops that are compiled for several instruction sets; the program picks one when it starts.
//
// They are written plainly, so that the compiler vectorises them.
#ifndef BYTEPS_BASE_CLONES_H_
#define BYTEPS_BASE_CLONES_H_

#if defined(BYTEPS_MULTIVERSION)  // as the build chooses
#elif defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define BYTEPS_MULTIVERSION \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define BYTEPS_CHOOSES_CLONES
#else
#define BYTEPS_MULTIVERSION
#endif

// What a loop calls must become a part of it: a function of its own would be
// compiled once, for the oldest of those instruction sets.
#define BYTEPS_INLINE __attribute__((always_inline))

#endif  // BYTEPS_BASE_CLONES_H_
