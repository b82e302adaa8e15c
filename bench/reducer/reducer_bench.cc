// Times the additions of byteps/server/reducer.h, and the optimizer's AdamW
// (byteps/server/optimizer/update.h), in one thread. Each is compared with a plain loop that reads
// and writes the same memory and computes almost nothing. Averages are also compared with a loop of
// plain arithmetic.
//
// usage: reducer_bench PARTITION_BYTES WORKING_SET_BYTES REPEATS
//
// Prints a JSON object per line: the operation, its type, the samples of both in seconds, and the
// number of wrong results. bench/reducer/run.py builds and runs it, and makes a table.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <string>
#include <vector>

#include "operations.h"

namespace bench {
namespace {

size_t SizeOf(const Stream& stream, DType t) {
  if (stream.use == Use::kNone) return 0;
  return stream.wide ? WideSize(t) : byteps::core::SizeOf(t);
}

// Three buffers for a number of elements, each starting on a cache line.
class Buffers {
 public:
  Buffers(const Operation& operation, DType t, size_t n) : operation_(operation), t_(t) {
    for (int i = 0; i < 3; ++i) {
      const size_t bytes = SizeOf(operation.streams[i], t) * n;
      data_[i] = bytes == 0 ? nullptr : static_cast<char*>(aligned_alloc(4096, RoundUp(bytes)));
      if (bytes != 0 && data_[i] == nullptr) {
        fprintf(stderr, "reducer_bench: no memory for %zu bytes\n", bytes);
        exit(1);
      }
    }
    Fill(n);
  }
  ~Buffers() {
    for (char* p : data_) free(p);
  }
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;

  // Element `i` of every buffer.
  char* At(int buffer, size_t i) const {
    return data_[buffer] == nullptr ? nullptr
                                    : data_[buffer] + i * SizeOf(operation_.streams[buffer], t_);
  }
  void Fill(size_t n) {
    for (int b = 0; b < 3; ++b) {
      if (data_[b] == nullptr) continue;
      // Some periods of the input are computed. The others are copies.
      const size_t size = SizeOf(operation_.streams[b], t_);
      const size_t period = std::min<size_t>(n, kPeriod * 4096);
      for (size_t i = 0; i < period; ++i)
        Put(t_, operation_.streams[b].wide, data_[b], i, Value(b, i));
      for (size_t i = period; i < n; i += period)
        memcpy(data_[b] + i * size, data_[b], std::min(period, n - i) * size);
    }
  }

 private:
  // Rounds up so that there is room for an unaligned copy.
  static size_t RoundUp(size_t bytes) { return (bytes + 4096 + 4095) / 4096 * 4096; }

  const Operation& operation_;
  const DType t_;
  char* data_[3] = {};
};

// Runs once over n elements, `shift` bytes out of alignment, and counts the wrong results.
size_t CountWrong(const Operation& operation, DType t, size_t n, size_t shift) {
  Buffers buffers(operation, t, n);
  char* p[3];
  for (int b = 0; b < 3; ++b) {
    p[b] = buffers.At(b, 0);
    // Accumulators belong to the server, and are always aligned.
    if (p[b] == nullptr || operation.streams[b].wide) continue;
    memmove(p[b] + shift, p[b], n * SizeOf(operation.streams[b], t));
    p[b] += shift;
  }
  operation.run(t, p[0], p[1], p[2], n);
  size_t wrong = 0;
  for (int b = 0; b < 3; ++b) {
    if (!Writes(operation.streams[b])) continue;
    for (size_t i = 0; i < n; ++i) {
      const double expected = operation.expected(Value(0, i), Value(1, i), Value(2, i));
      wrong += Get(t, operation.streams[b].wide, p[b], i) != expected;
    }
  }
  return wrong;
}

// Returns the CPU time of this thread, which excludes other threads of the machine.
double ThreadSeconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return now.tv_sec + now.tv_nsec * 1e-9;
}

double Seconds(const std::function<void()>& work) {
  const double start = ThreadSeconds();
  work();
  return ThreadSeconds() - start;
}

std::string List(const std::vector<double>& samples) {
  std::string text;
  for (double sample : samples) {
    char one[32];
    snprintf(one, sizeof(one), "%s%.9g", text.empty() ? "" : ", ", sample);
    text += one;
  }
  return "[" + text + "]";
}

// Returns the clone of the reducer that runs on this CPU.
const char* Level() {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
  if (__builtin_cpu_supports("x86-64-v4")) return "x86-64-v4";
  if (__builtin_cpu_supports("x86-64-v3")) return "x86-64-v3";
  return "x86-64";
#else
  return "as compiled";
#endif
}

struct Settings {
  size_t partition_bytes;
  size_t working_set;
  int repeats;
};

// A line of output.
struct Row {
  const char* operation;
  DType t;
  size_t read, written, bytes;
  std::vector<double> ours, plain;
  size_t wrong;
  std::vector<double> arithmetic;
};

void Print(const Row& row) {
  printf(
      "{\"operation\": \"%s\", \"type\": \"%s\", \"read\": %zu, "
      "\"written\": %zu, \"bytes\": %zu, \"seconds\": %s, \"plain_seconds\": %s, "
      "\"arithmetic_seconds\": %s, \"wrong\": %zu, \"level\": \"%s\"}\n",
      row.operation, byteps::core::NameOf(row.t), row.read, row.written, row.bytes,
      List(row.ours).c_str(), List(row.plain).c_str(), List(row.arithmetic).c_str(), row.wrong,
      Level());
  fflush(stdout);
}

// Measures an operation over the working set, partition by partition.
void Measure(const Operation& operation, DType t, const Settings& settings) {
  const size_t per_line = kLine / byteps::core::SizeOf(t);
  const size_t n = settings.partition_bytes / byteps::core::SizeOf(t) / per_line * per_line;
  size_t read = 0, written = 0;
  for (const Stream& stream : operation.streams) {
    if (Reads(stream)) read += SizeOf(stream, t);
    if (Writes(stream)) written += SizeOf(stream, t);
  }
  size_t widths = 0;
  for (const Stream& stream : operation.streams) widths += SizeOf(stream, t);
  const size_t partitions = settings.working_set / (widths * n) + 2;
  Buffers buffers(operation, t, n * partitions);
  auto each = [&](const std::function<void(char*, char*, char*)>& work) {
    for (size_t p = 0; p < partitions; ++p)
      work(buffers.At(0, p * n), buffers.At(1, p * n), buffers.At(2, p * n));
  };
  const bool computes = operation.arithmetic != nullptr && HasPlainAverage(t);
  // Samples of the operation, of the plain loop, and of plain arithmetic.
  std::vector<double> samples[3];
  auto run = [&](int which, char* a, char* b, char* c) {
    if (which == 0) operation.run(t, a, b, c, n);
    if (which == 1) operation.plain(a, b, c, n / per_line);
    if (which == 2) operation.arithmetic(t, a, b, c, n);
  };
  const int loops = computes ? 3 : 2;
  for (int i = -1; i < settings.repeats; ++i) {  // the first is warm-up
    // The loops are interleaved, so that disturbances of the machine affect all. The loop that
    // starts rotates.
    for (int k = 0; k < loops; ++k) {
      const int which = (i + 1 + k) % loops;
      buffers.Fill(n * partitions);  // otherwise sums would overflow and quotients become subnormal
      const double seconds =
          Seconds([&] { each([&](char* a, char* b, char* c) { run(which, a, b, c); }); });
      if (i >= 0) samples[which].push_back(seconds);
    }
  }
  const size_t wrong = CountWrong(operation, t, n, 0) + CountWrong(operation, t, 1003, 1);
  Print({operation.name, t, read, written, (read + written) * n * partitions, samples[0],
         samples[1], wrong, samples[2]});
}

// Measures AdamW over the working set, partition by partition.
void MeasureAdamW(DType t, const Settings& settings) {
  const size_t n = settings.partition_bytes / byteps::core::SizeOf(t) / kLine * kLine;
  const size_t element = byteps::core::SizeOf(t) + AdamWRun::kSlots * sizeof(float);
  const size_t partitions = settings.working_set / (element * n) + 2;
  AdamWRun run(t, n * partitions);
  std::vector<double> ours, plain;
  for (int i = -1; i < settings.repeats; ++i) {  // the first is warm-up
    run.Fill();
    const auto each = [&](void (AdamWRun::*work)(size_t, size_t)) {
      for (size_t p = 0; p < partitions; ++p) (run.*work)(p * n, n);
    };
    const double one = Seconds([&] { each(&AdamWRun::Update); });
    const double other = Seconds([&] { each(&AdamWRun::Plain); });
    if (i < 0) continue;
    ours.push_back(one);
    plain.push_back(other);
  }
  const size_t bytes = 2 * run.width() * n * partitions;
  const size_t wrong = AdamWRun(t, 1003).CountWrong();
  Print({"AdamW", t, run.width(), run.width(), bytes, ours, plain, wrong, {}});
}

size_t Number(const char* text) {
  char* end = nullptr;
  const unsigned long long value = strtoull(text, &end, 10);
  if (*text == '\0' || *end != '\0' || value == 0) {
    fprintf(stderr, "reducer_bench: '%s' is no positive number\n", text);
    exit(2);
  }
  return value;
}

}  // namespace
}  // namespace bench

int main(int argc, char** argv) {
  using bench::DType;
  if (argc != 4) {
    fprintf(stderr, "usage: reducer_bench PARTITION_BYTES WORKING_SET_BYTES REPEATS\n");
    return 2;
  }
  const bench::Settings settings{bench::Number(argv[1]), bench::Number(argv[2]),
                                 static_cast<int>(bench::Number(argv[3]))};
  for (const bench::Operation& operation : bench::Operations()) {
    for (DType t : {DType::kFloat32, DType::kBFloat16, DType::kFloat16})
      bench::Measure(operation, t, settings);
  }
  for (DType t : {DType::kFloat32, DType::kBFloat16}) bench::MeasureAdamW(t, settings);
  return 0;
}
