// A worker without Python: sums tensors in a real job, and checks every value.
//
//   sum_worker [--rounds N] [--tensors N] [--bytes N] [--seed N] [--pause-ms N] [--salt N]
//              [--fail-in N] [--break-invariant]
//
// Settings come from the environment, as for any worker. Each round sums all tensors at once.
// Inputs depend on rank, tensor, element, round and salt, and are integers, so that every sum is
// known exactly. Each generation of a job has its own salt, so that pushes of another generation
// would change a sum.
//
// In round --fail-in the first push of rank 0 has an undeclared key, so its operation fails at this
// rank before the push. Other ranks may fail in that round, too; then all continue.
//
// Exit status: 0 all sums were right; 1 the job failed, the last line says why; 2 bad usage; 3 a
// sum neither arrived in time nor failed; 4 a sum was wrong; 5 all sums were right, but an
// invariant (base/invariant.h) was broken. --break-invariant breaks one before the first round.
#include <getopt.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "byteps/base/config.h"
#include "byteps/base/invariant.h"
#include "byteps/cluster/session.h"
#include "byteps/engine/worker.h"
#include "byteps/recovery/worker/server_replacement.h"

namespace byteps {
namespace core {
namespace {

enum ExitStatus { kGood = 0, kFailed = 1, kUsage = 2, kLate = 3, kWrong = 4, kBroken = 5 };

struct Options {
  int rounds = 20;
  int tensors = 4;
  long bytes = 40'000;
  int seed = 1;
  int pause_ms = 0;
  int salt = 0;
  int fail_in = -1;
  bool breaks_invariant = false;
};

// A session that can send the next push with an undeclared key.
class BrokenSession : public Session {
 public:
  using Session::Session;

  void BreakNextPush() { breaks_ = true; }

  void Send(const Message& message) override {
    if (message.values.empty() || !breaks_.exchange(false)) return Session::Send(message);
    Message broken = message;
    broken.key ^= kMaxPartitions;
    Session::Send(broken);
  }

 private:
  std::atomic<bool> breaks_{false};
};

struct Tensor {
  std::string name;
  std::vector<float> values;
};

// Sums of 64 of these are exact in fp32.
float InputOf(uint64_t salt, uint64_t rank, uint64_t tensor, uint64_t round, uint64_t index) {
  return static_cast<float>(
      (salt * 611953 + rank * 7919 + tensor * 104729 + round * 1299709 + index * 31) % 200'003);
}

float SumOf(uint64_t salt, int size, uint64_t tensor, uint64_t round, uint64_t index) {
  float sum = 0;
  for (int rank = 0; rank < size; ++rank) sum += InputOf(salt, rank, tensor, round, index);
  return sum;
}

class Job {
 public:
  Job(const Options& options, const Config& config)
      : options_(options),
        launch_(Launch::From(config)),
        patience_(config.Float("BYTEPS_OP_TIMEOUT_S") + config.Float("BYTEPS_PEER_TIMEOUT_S") +
                  60) {
    SessionOptions session;
    session.rank = launch_.rank;
    session.num_workers = launch_.size;
    session.num_servers = static_cast<int>(config.Int("DMLC_NUM_SERVER"));
    for (int i = 0; i < options.tensors; ++i) {
      // The sizes differ, so that partitions are cut at different places.
      const size_t count = std::max<size_t>(1, options.bytes / sizeof(float) / (i + 1));
      tensors_.push_back({"tensor." + std::to_string(i), std::vector<float>(count)});
    }
    auto made = std::make_unique<BrokenSession>(config, session);
    session_ = made.get();
    worker_.Start(config, launch_, session.num_servers, std::move(made),
                  MakeLossPolicy(config, session.num_servers));
  }

  ExitStatus Run() {
    ExitStatus status = kGood;
    try {
      status = Work();
    } catch (const std::exception& e) {
      worker_.Stop(false, e.what());
      throw;
    }
    worker_.Stop(false, status == kGood ? "" : "exit status " + std::to_string(status));
    if (status != kGood || ps::NumBrokenInvariants() == 0) return status;
    fprintf(stderr, "%s\n", ps::BrokenInvariants().last.c_str());
    return kBroken;
  }

 private:
  ExitStatus Work() {
    std::vector<TensorSpec> specs;
    for (auto& tensor : tensors_) specs.push_back(SpecOf(tensor));
    worker_.Declare(specs);
    BPS_INVARIANT_NOTED("nothing is broken on purpose", !options_.breaks_invariant,
                        "this worker was told to");
    std::mt19937 random(options_.seed * 1000 + launch_.rank);
    for (int round = 0; round < options_.rounds; ++round) {
      const bool fails = round == options_.fail_in;
      const ExitStatus status = fails ? Fail(&random) : Sum(round, &random);
      if (status != kGood) return status;
      std::this_thread::sleep_for(std::chrono::milliseconds(options_.pause_ms));
    }
    return kGood;
  }

  static TensorSpec SpecOf(const Tensor& tensor) {
    TensorSpec spec;
    spec.name = tensor.name;
    spec.bytes = tensor.values.size() * sizeof(float);
    spec.average = false;
    return spec;
  }

  // Runs the failing round: rank 0 fails, and then perhaps the others.
  ExitStatus Fail(std::mt19937* random) {
    if (launch_.rank == 0) session_->BreakNextPush();
    std::string error;
    const ExitStatus status = Sum(options_.fail_in, random, &error);
    if (status != kGood) return status;
    fprintf(stderr, "round %d: %s\n", options_.fail_in, error.c_str());
    return launch_.rank == 0 && error.empty() ? kWrong : kGood;
  }

  // `error`: if operations may fail, gets the last error.
  ExitStatus Sum(int round, std::mt19937* random, std::string* error = nullptr) {
    std::vector<std::pair<int, int64_t>> handles;
    for (int i = 0; i < options_.tensors; ++i) {
      auto& values = tensors_[i].values;
      for (size_t k = 0; k < values.size(); ++k) {
        values[k] = InputOf(options_.salt, launch_.rank, i, round, k);
      }
      PushPullRequest request;
      request.tensor = SpecOf(tensors_[i]);
      request.input = request.output = values.data();
      request.priority = static_cast<int>((*random)() % 3);
      handles.push_back({i, worker_.PushPull(request)});
    }
    std::shuffle(handles.begin(), handles.end(), *random);
    for (const auto& [i, handle] : handles) {
      try {
        if (!worker_.WaitFor(handle, nullptr,
                             std::chrono::nanoseconds(static_cast<int64_t>(patience_ * 1e9)))) {
          fprintf(stderr, "no answer: tensor %d of round %d\n", i, round);
          return kLate;
        }
      } catch (const Error& e) {
        if (error == nullptr) throw;
        *error = e.what();
        continue;
      }
      if (!IsRight(i, round)) return kWrong;
    }
    return kGood;
  }

  bool IsRight(int i, int round) const {
    const auto& values = tensors_[i].values;
    for (size_t k = 0; k < values.size(); ++k) {
      const float wanted = SumOf(options_.salt, launch_.size, i, round, k);
      if (values[k] == wanted) continue;
      fprintf(stderr, "wrong sum: tensor %d, round %d, element %zu is %.1f, not %.1f\n", i, round,
              k, values[k], wanted);
      return false;
    }
    return true;
  }

  const Options options_;
  const Launch launch_;
  const double patience_;  // seconds, by which the worker itself must have given up
  std::vector<Tensor> tensors_;
  BrokenSession* session_ = nullptr;  // owned by worker_
  Worker worker_;                     // last: it writes into the tensors
};

int Main(int argc, char** argv) {
  Options options;
  const option names[] = {{"rounds", required_argument, nullptr, 'r'},
                          {"tensors", required_argument, nullptr, 't'},
                          {"bytes", required_argument, nullptr, 'b'},
                          {"seed", required_argument, nullptr, 's'},
                          {"pause-ms", required_argument, nullptr, 'p'},
                          {"salt", required_argument, nullptr, 'x'},
                          {"fail-in", required_argument, nullptr, 'f'},
                          {"break-invariant", no_argument, nullptr, 'i'},
                          {nullptr, 0, nullptr, 0}};
  for (int c; (c = getopt_long(argc, argv, "", names, nullptr)) != -1;) {
    if (c == 'r') options.rounds = atoi(optarg);
    if (c == 't') options.tensors = atoi(optarg);
    if (c == 'b') options.bytes = atol(optarg);
    if (c == 's') options.seed = atoi(optarg);
    if (c == 'p') options.pause_ms = atoi(optarg);
    if (c == 'x') options.salt = atoi(optarg);
    if (c == 'f') options.fail_in = atoi(optarg);
    if (c == 'i') options.breaks_invariant = true;
    if (c == '?') return kUsage;
  }
  if (optind < argc) {
    fprintf(stderr, "sum_worker: unexpected argument '%s'\n", argv[optind]);
    return kUsage;
  }
  try {
    Job job(options, Config::FromEnvironment());
    return job.Run();
  } catch (const UsageError& e) {
    fprintf(stderr, "sum_worker: %s\n", e.what());
    return kUsage;
  } catch (const std::exception& e) {
    fprintf(stderr, "sum_worker: %s\n", e.what());
    return kFailed;
  }
}

}  // namespace
}  // namespace core
}  // namespace byteps

int main(int argc, char** argv) { return byteps::core::Main(argc, argv); }
