// How an operation uses memory, and the plain loop that uses it alike.
#ifndef BENCH_REDUCERKIT_STREAMS_H_
#define BENCH_REDUCERKIT_STREAMS_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace bench {

enum class Use { kNone, kRead, kWrite, kUpdate };

// How an operation uses one of three buffers.  A wide one holds accumulators.
struct Stream {
  Use use = Use::kNone;
  bool wide = false;
};

constexpr bool Reads(Stream s) { return s.use == Use::kRead || s.use == Use::kUpdate; }
constexpr bool Writes(Stream s) { return s.use == Use::kWrite || s.use == Use::kUpdate; }

constexpr Stream kRead{Use::kRead, false};
constexpr Stream kWrite{Use::kWrite, false};
constexpr Stream kUpdate{Use::kUpdate, false};
constexpr Stream kReadWide{Use::kRead, true};
constexpr Stream kWriteWide{Use::kWrite, true};
constexpr Stream kUpdateWide{Use::kUpdate, true};

constexpr size_t kLine = 64;

typedef uint64_t Line __attribute__((vector_size(kLine)));

inline Line Load(const char* p) {
  Line v;
  memcpy(&v, p, sizeof(v));
  return v;
}

template <Stream S>
inline void Fetch(const char* p, size_t step, Line* lines) {
  if constexpr (Reads(S)) {
    constexpr size_t count = S.wide ? 2 : 1;
    for (size_t i = 0; i < count; ++i) lines[i % 2] += Load(p + (step * count + i) * kLine);
    if constexpr (!S.wide) lines[1] += lines[0];
  }
}

template <Stream S>
inline void Put(char* p, size_t step, const Line* lines) {
  if constexpr (Writes(S)) {
    constexpr size_t count = S.wide ? 2 : 1;
    for (size_t i = 0; i < count; ++i) memcpy(p + (step * count + i) * kLine, &lines[i], kLine);
  }
}

// Reads and writes the lines of three buffers as the streams say; `steps` counts
// those of the buffers that are not wide, which have half as many as a wide one.
template <Stream A, Stream B, Stream C>
void Touch(char* a, char* b, char* c, size_t steps) {
  for (size_t step = 0; step < steps; ++step) {
    Line lines[2] = {Line{} + 1, Line{} + 1};  // what is updated must change
    Fetch<A>(a, step, lines);
    Fetch<B>(b, step, lines);
    Fetch<C>(c, step, lines);
    Put<A>(a, step, lines);
    Put<B>(b, step, lines);
    Put<C>(c, step, lines);
  }
}

}  // namespace bench
#endif  // BENCH_REDUCERKIT_STREAMS_H_
