// A server whose workers are members of the job, and broken: they declare what does not fit
// together, push and pull what they did not declare, twice, out of turn, or in other sizes, and
// leave in between.  Each request is answered at most once, and a sum that is answered is right.
#include <fuzzer/FuzzedDataProvider.h>

#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "byteps/base/config.h"
#include "byteps/base/declaration_list.h"
#include "byteps/server/sum_server.h"
#include "demand.h"
#include "ps/base.h"
#include "ps/internal/postoffice.h"

namespace byteps {
namespace core {
namespace {

constexpr int kWorkers = 3;
constexpr uint32_t kPartitionBytes = 16;

// Takes the answers.
class Answers : public Channel {
 public:
  void Start(ChannelUser*) override {}
  void Leave(bool, const std::string&) override {}
  void Stop() override {}
  void Abandon(const void*, size_t) override {}
  bool RegistersMemory() const override { return false; }
  int rank() const override { return 0; }
  std::string NameOfServer(int) override { return "server"; }
  std::string NameOfWorker(int) override { return "worker"; }

  bool Send(ps::Message* message) override {
    const ps::Meta& meta = message->meta;
    std::lock_guard<std::mutex> lock(mu_);
    const auto key = std::make_pair(meta.recver, meta.addr);
    DEMAND(asked_.count(key) == 1);
    DEMAND(asked_[key]-- == 1);  // answered once
    DEMAND(!meta.request);
    DEMAND((meta.option != 0) == !meta.body.empty());
    for (const auto& value : message->data) {
      // Each worker pushes ones, so that a sum counts who is in it.
      for (size_t i = 0; i + sizeof(float) <= value.size(); i += sizeof(float)) {
        float sum = 0;
        memcpy(&sum, value.data() + i, sizeof(sum));
        DEMAND(sum == 1 || sum == 2 || sum == 3);
      }
    }
    return true;
  }

  void WillAsk(int sender, uint64_t number) {
    std::lock_guard<std::mutex> lock(mu_);
    asked_[{sender, number}] = 1;
  }

 private:
  std::mutex mu_;
  std::map<std::pair<int, uint64_t>, int> asked_;
};

Declaration AnyDeclaration(FuzzedDataProvider* data) {
  Declaration d;
  d.name = std::string(1, 'a' + data->ConsumeIntegralInRange<int>(0, 2));
  d.dtype = DType::kFloat32;
  d.fused = data->ConsumeIntegralInRange<int>(0, 3) > 0;
  d.bytes = 4 * data->ConsumeIntegralInRange<uint64_t>(1, 8);
  d.partition_bytes = kPartitionBytes;
  for (uint32_t rank = 0; rank < kWorkers; ++rank) {
    if (data->ConsumeIntegralInRange<int>(0, 7) > 0) d.group.push_back(rank);
  }
  if (d.group.empty()) d.group.push_back(0);
  return d;
}

ps::SArray<char> Ones(size_t bytes) {
  ps::SArray<char> values;
  values.resize(bytes);
  const float one = 1;
  for (size_t i = 0; i < bytes; ++i) {
    values[i] = reinterpret_cast<const char*>(&one)[i % sizeof(one)];
  }
  return values;
}

ps::Message AnyRequest(FuzzedDataProvider* data, uint64_t number) {
  const int op = data->ConsumeIntegralInRange<int>(0, 12);
  if (op < 4) {
    const Declaration d = AnyDeclaration(data);
    std::string body = PackDeclarations({d});
    if (op == 0) body = data->ConsumeRandomLengthString(64);
    return MakeRequest(kDeclare, 8, d.Key(), number, body);
  }
  Declaration d = AnyDeclaration(data);
  const uint64_t index = data->ConsumeIntegralInRange<uint64_t>(0, 3);
  const uint64_t size = std::min<uint64_t>(
      index * kPartitionBytes < d.bytes ? d.bytes - index * kPartitionBytes : 4, kPartitionBytes);
  uint32_t header[4] = {data->ConsumeIntegralInRange<uint32_t>(0, 3), 60'000, 0,
                        static_cast<uint32_t>(size)};
  if (data->ConsumeIntegralInRange<int>(0, 7) == 0) {
    for (uint32_t& field : header) field = data->ConsumeIntegral<uint32_t>();
    header[1] = 60'000;
  }
  std::string body(reinterpret_cast<const char*>(header), sizeof(header));
  if (data->ConsumeIntegralInRange<int>(0, 15) == 0) body = data->ConsumeRandomLengthString(24);
  const int kinds[] = {kPushPull, kPush, kPull};
  int kind = kinds[data->ConsumeIntegralInRange<int>(0, 2)];
  if (op == 12) kind = data->ConsumeIntegral<int>();
  ps::Message request = MakeRequest(kind, 8, d.Key() + index, number, body);
  if (kind != kPull) {
    const bool fits = data->ConsumeIntegralInRange<int>(0, 15) > 0;
    AddValues(&request, Ones(fits ? size : data->ConsumeIntegralInRange<size_t>(0, 40)));
  }
  return request;
}

const Config& TheConfig(bool deterministic) {
  static const auto make = [](const char* value) {
    setenv("BYTEPS_LOG_LEVEL", "FATAL", 1);
    setenv("BYTEPS_SERVER_ENGINE_THREAD", "1", 1);
    setenv("BYTEPS_DETERMINISTIC", value, 1);
    return Config::FromEnvironment();
  };
  static const Config configs[] = {make("0"), make("1")};
  return configs[deterministic ? 1 : 0];
}

}  // namespace
}  // namespace core
}  // namespace byteps

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  using namespace byteps::core;  // NOLINT: a target has one function
  FuzzedDataProvider data(bytes, size);
  Answers answers;
  Server server(TheConfig(data.ConsumeBool()), &answers);
  for (uint64_t number = 1; data.remaining_bytes() > 0 && number < 200; ++number) {
    if (data.ConsumeIntegralInRange<int>(0, 31) == 0) {
      server.OnWorkerGone(data.ConsumeIntegralInRange<int>(0, kWorkers), "it left");
      continue;
    }
    ps::Message request = AnyRequest(&data, number);
    const int rank = data.ConsumeIntegralInRange<int>(0, kWorkers);
    request.meta.sender = ps::Postoffice::WorkerRankToID(rank);
    answers.WillAsk(request.meta.sender, number);
    server.OnMessage(&request);
  }
  return 0;
}
