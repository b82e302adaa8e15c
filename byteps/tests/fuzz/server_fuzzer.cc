// Fuzzers of bytes from a network: messages of each kind, and requests of malformed workers to a
// server. Tests.cmake makes a program of each function `Fuzz_NAME`, which libFuzzer calls.
#include <fuzzer/FuzzedDataProvider.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "byteps/base/block_codec.h"
#include "byteps/base/config.h"
#include "byteps/base/protocol.h"
#include "byteps/base/shared_bytes.h"
#include "byteps/base/wire.h"
#include "byteps/cluster/channel.h"
#include "byteps/net/link/admission.h"
#include "byteps/net/rdma/wire.h"
#include "byteps/net/tcp/wire.h"
#include "byteps/observe/http_server.h"
#include "ps/base.h"
#include "tests/support/kit.h"
#include "tests/support/recovering_server.h"

// Arbitrary bytes after a TCP connection's greeting: a frame's header, and its meta.
extern "C" int Fuzz_frame(const uint8_t* data, size_t size) {
  const char* bytes = reinterpret_cast<const char*>(data);
  while (size >= ps::tcp::kFrameHeaderBytes) {
    ps::tcp::FrameHeader header;
    if (!ps::tcp::DecodeFrameHeader(bytes, &header)) return 0;
    DEMAND(header.values <= ps::tcp::kMaxValues && header.meta_bytes <= ps::kMaxMetaBytes);
    bytes += ps::tcp::kFrameHeaderBytes;
    size -= ps::tcp::kFrameHeaderBytes;
    const size_t meta_bytes = std::min<size_t>(header.meta_bytes, size);
    // Copied, so that a read beyond its end is detected.
    const std::vector<char> copy(bytes, bytes + meta_bytes);
    ps::Meta meta;
    if (!ps::DecodeMeta(copy.data(), copy.size(), &meta)) return 0;
    bytes += meta_bytes;
    size -= meta_bytes;
  }
  return 0;
}

// Feeds arbitrary bytes to either side, at the beginning of a TCP connection.
extern "C" int Fuzz_hello(const uint8_t* data, size_t size) {
  if (size < ps::tcp::kPreambleBytes) return 0;
  const std::vector<char> bytes(data, data + size);
  if (!ps::tcp::Mismatch(bytes.data()).empty()) return 0;
  if (size >= ps::tcp::kHelloBytes) {
    const std::string again = ps::tcp::DecodeHello(bytes.data()).Encode();
    DEMAND(again.size() == ps::tcp::kHelloBytes);
    DEMAND(ps::tcp::DecodeHello(again.data()).Encode() == again);
  }
  if (size >= ps::tcp::kChallengeBytes) {
    size_t refusal_bytes = 0;
    const ps::tcp::Challenge challenge = ps::tcp::DecodeChallenge(bytes.data(), &refusal_bytes);
    DEMAND(refusal_bytes <= ps::tcp::kMaxRefusalBytes);
    DEMAND(challenge.Encode().size() == ps::tcp::kChallengeBytes);
  }
  if (size >= ps::tcp::kReplyBytes) {
    size_t refusal_bytes = 0;
    const ps::tcp::Reply reply = ps::tcp::DecodeReply(bytes.data(), &refusal_bytes);
    DEMAND(refusal_bytes <= ps::tcp::kMaxRefusalBytes);
    DEMAND(reply.Encode().size() == ps::tcp::kReplyBytes);
  }
  return 0;
}

// Arbitrary bytes as the meta of a message. They are refused, or encoded to the same bytes.
extern "C" int Fuzz_meta(const uint8_t* data, size_t size) {
  const char* const bytes = reinterpret_cast<const char*>(data);
  ps::Meta meta;
  if (!ps::DecodeMeta(bytes, size, &meta)) return 0;
  DEMAND(!meta.DebugString().empty());  // the log prints it
  DEMAND(ps::EncodeMeta(meta) == std::string(bytes, size));
  return 0;
}

namespace {

// Accepted messages must be encoded to the same bytes.
template <typename T>
void Try(const std::vector<char>& bytes) {
  T first;
  if (!first.Decode(bytes.data(), bytes.size())) return;
  const std::string sent = first.Encode();
  T second;
  DEMAND(second.Decode(sent.data(), sent.size()));
  DEMAND(second.Encode() == sent);
}

}  // namespace

// Arbitrary bytes on RDMA connections: requests, replies, refusals, frames, targets.
extern "C" int Fuzz_rdma(const uint8_t* data, size_t size) {
  const std::vector<char> bytes(data, data + size);
  const bool ours = ps::rdma::Mismatch(bytes.data(), bytes.size()).empty();
  if (ours) Try<ps::rdma::ConnectRequest>(bytes);
  if (ours) Try<ps::rdma::ConnectReply>(bytes);
  if (ours) Try<ps::rdma::Challenge>(bytes);
  Try<ps::rdma::Refusal>(bytes);
  Try<ps::rdma::FrameHeader>(bytes);
  Try<ps::rdma::Target>(bytes);
  Try<ps::rdma::Offer>(bytes);
  Try<ps::rdma::Resume>(bytes);
  return 0;
}

namespace byteps {
namespace core {

// Arbitrary bytes as a list of declarations. They are refused with a reason, or are valid.
extern "C" int Fuzz_declarations(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  std::vector<Declaration> declarations;
  std::string error;
  if (!UnpackDeclarations(text, &declarations, &error)) {
    DEMAND(!error.empty());
    return 0;
  }
  for (const Declaration& d : declarations) {
    const uint64_t partitions = d.NumPartitions();
    DEMAND(partitions >= 1 && partitions <= kMaxPartitions);
    const uint64_t last = d.PartitionSize(partitions - 1);
    DEMAND(last >= 1 && last <= d.partition_bytes);
    DEMAND((partitions - 1) * d.partition_bytes + last == d.bytes);
    DEMAND(d.Key() % kMaxPartitions == 0);
    DEMAND(d.MemberIndex(d.group.back()) == static_cast<int>(d.group.size()) - 1);
    DEMAND(!d.Describe().empty());
  }
  if (declarations.empty()) return 0;
  std::vector<Declaration> again;
  const std::string packed = PackDeclarations(declarations);
  DEMAND(UnpackDeclarations(packed, &again, &error));
  DEMAND(again == declarations);
  return 0;
}

// Arbitrary bytes as an HTTP request. It is answered with head and body, or is incomplete.
extern "C" int Fuzz_http(const uint8_t* data, size_t size) {
  const std::string request(reinterpret_cast<const char*>(data), size);
  int asked = 0;
  const auto handler = [&](const std::string& path) {
    ++asked;
    DEMAND(path.find_first_of("\r\n?") == std::string::npos);
    DEMAND(path.size() < kMostHttpRequestBytes);
    HttpAnswer answer;
    answer.body = "here";
    return answer;
  };
  const std::string reply = ReplyTo(request, handler);
  DEMAND(asked <= 1);
  if (reply.empty()) {
    DEMAND(asked == 0 && size < kMostHttpRequestBytes);
    return 0;
  }
  DEMAND(reply.rfind("HTTP/1.1 ", 0) == 0);
  DEMAND((asked == 1) == (reply.compare(9, 3, "200") == 0));
  DEMAND(reply.find("\r\n\r\n") != std::string::npos);
  return 0;
}

namespace {

constexpr int kWorkers = 3;
constexpr uint32_t kPartitionBytes = 16;
constexpr uint64_t kBlocks = 2;  // blocks of a partition of few bits, which is the longest
constexpr DType kFewBits[] = {DType::kInt8x128, DType::kInt4x128};

// Returns the type that has a partition of this size; float32 if none has.
DType TypeOf(size_t bytes) {
  for (const DType t : kFewBits) {
    if (bytes > 0 && bytes % SizeOf(t) == 0) return t;
  }
  return DType::kFloat32;
}

// Checks the answers.
class Answers : public ServerChannel {
 public:
  void Send(const Message& message) override {
    std::lock_guard<std::mutex> lock(mu_);
    const auto key = std::make_pair(message.peer, message.number);
    DEMAND(asked_.count(key) == 1);
    DEMAND(asked_[key]-- == 1);  // answered once
    DEMAND(!message.is_request);
    const int op = message.op;
    DEMAND(!message.failed || !message.body.empty());
    const size_t about = message.failed ? 0 : message.body.size();
    if (op == kPushPull) {
      const size_t kept = about < sizeof(uint32_t) ? 0 : sizeof(uint32_t);
      DEMAND(about - kept <= 1);  // members missing in a sum
    } else {
      DEMAND(message.failed || about == (op == kPushTry ? sizeof(GradientSums) : 0));
    }
    if (op == kPushNorm) {
      ForEach<double>(message.values, [](double sum) { DEMAND(sum >= 0); });
    } else if (op == kPushStep || op == kPushTry || op == kStep) {
      // Parameters start at 0, and gradients are positive.
      ForEach<float>(message.values,
                     [this](float x) { DEMAND(strange_ || (x <= 0 && std::isfinite(x))); });
    } else if (op != kReadState) {
      // Each worker pushes ones, so that a sum counts its pushes.
      const DType type = TypeOf(message.values.size());
      const double rounded = type == DType::kFloat32 ? 0 : 0.1;
      ForEach<float>(Decoded(type, message.values), [rounded](float sum) {
        DEMAND(sum >= 1 - rounded && sum <= 3 + rounded);
        DEMAND(std::fabs(sum - std::round(sum)) <= rounded);
      });
    }
  }

  void WillAsk(int rank, uint64_t number) {
    std::lock_guard<std::mutex> lock(mu_);
    asked_[{rank, number}] = 1;
  }

  // Allows steps of any size from now on.
  void ExpectAnything() {
    std::lock_guard<std::mutex> lock(mu_);
    strange_ = true;
  }

 private:
  static SharedBytes Decoded(DType type, const SharedBytes& values) {
    if (type == DType::kFloat32) return values;
    const uint64_t count = ValuesIn(type, values.size());
    SharedBytes decoded = SharedBytes::New(count * sizeof(float));
    DecodeBlocks(type, values.data(), DType::kFloat32, decoded.data(), count);
    return decoded;
  }

  template <typename T, typename Look>
  static void ForEach(const SharedBytes& value, Look look) {
    for (size_t i = 0; i + sizeof(T) <= value.size(); i += sizeof(T)) {
      T x = 0;
      memcpy(&x, value.data() + i, sizeof(x));
      look(x);
    }
  }

  std::mutex mu_;
  std::map<std::pair<int, uint64_t>, int> asked_;
  bool strange_ = false;
};

constexpr int kTensors = 8;

// Returns one of eight declarations, so that workers often agree. Three tensors are summed, three
// updated, and two summed in few bits.
Declaration TheDeclaration(int which) {
  Declaration d;
  d.name = std::string(1, 'a' + which);
  d.dtype = DType::kFloat32;
  d.bytes = 24 + 8 * (which % 3);
  d.partition_bytes = kPartitionBytes;
  d.in_order = which == 2;
  d.group = RankGroup::Below(which % 3 + 1);
  if (which >= 6) {
    d.dtype = kFewBits[which - 6];
    d.bytes = (kBlocks + 1) * SizeOf(d.dtype);
    d.partition_bytes = kBlocks * SizeOf(d.dtype);
    d.feedback = which == 7;
    d.stochastic = which == 6;
    return d;
  }
  if (which < 3) return d;
  auto rule = std::make_shared<UpdateRule>();
  if (which == 4) {
    rule->algorithm = UpdateRule::kAdamW;
    rule->groups.push_back({0.9, 0.99, 1e-8, false});
  } else {
    rule->algorithm = UpdateRule::kSgd;
    rule->groups.push_back({which == 5 ? 0.9 : 0.0, 0, 0, which == 5});
  }
  rule->groups.push_back(rule->groups[0]);
  rule->segments = {{3, 1}, {d.bytes / sizeof(float), 0}};
  rule->speculative = which != 3;
  rule->counts_zeros = which == 4;
  d.rule = rule;
  return d;
}

// Returns mostly one of those eight declarations, rarely a similar one.
Declaration AnyDeclaration(FuzzedDataProvider* data) {
  Declaration d = TheDeclaration(data->ConsumeIntegralInRange<int>(0, kTensors - 1));
  if (data->ConsumeIntegralInRange<int>(0, 7) > 0) return d;
  d.name = std::string(1, 'a' + data->ConsumeIntegralInRange<int>(0, kTensors));
  RankGroup::Ranks ranks;
  for (uint32_t rank = 0; rank < kWorkers; ++rank) {
    if (data->ConsumeBool()) ranks.push_back(rank);
  }
  if (ranks.empty()) ranks.push_back(0);
  d.group = std::move(ranks);
  if (data->ConsumeBool()) d.rule = nullptr;
  if (!d.rule) d.bytes = 4 * data->ConsumeIntegralInRange<uint64_t>(1, 8);
  return d;
}

SharedBytes Ones(size_t bytes) {
  SharedBytes values = SharedBytes::New(bytes);
  if (const DType type = TypeOf(bytes); type != DType::kFloat32) {
    const std::vector<float> ones(ValuesIn(type, bytes), 1);
    EncodeBlocks(type, values.data(), DType::kFloat32, ones.data(), ones.size(), nullptr);
    return values;
  }
  const float one = 1;
  for (size_t i = 0; i < bytes; ++i) {
    values.data()[i] = reinterpret_cast<const char*>(&one)[i % sizeof(one)];
  }
  return values;
}

// Part of an update's message before its detail.
std::string Header(uint32_t round, size_t wanted) {
  PushHeader header;
  header.round = header.oldest = round;
  header.timeout_ms = 60'000;
  header.pull_bytes = static_cast<uint32_t>(wanted);
  return header.Pack();
}

Message LoadOfZeros(const Declaration& d, uint64_t index, uint32_t slot, size_t bytes,
                    uint64_t number) {
  const std::string detail(reinterpret_cast<const char*>(&slot), sizeof(slot));
  Message request = MakeRequest(kLoadState, 0, d.Key() + index, number, Header(0, 0) + detail);
  const SharedBytes zeros = SharedBytes::New(bytes);
  memset(zeros.data(), 0, bytes);
  request.SetValues(zeros);
  return request;
}

// A request for an optimizer step, or about its state.
Message AnyUpdate(FuzzedDataProvider* data, uint64_t number, const Declaration& d, uint64_t index,
                  uint64_t size, Answers* answers) {
  const int kinds[] = {kPushStep, kPushTry, kPushTry, kPushNorm, kStep, kLoadState, kReadState};
  const int kind = kinds[data->ConsumeIntegralInRange<int>(0, 6)];
  const bool fits = data->ConsumeIntegralInRange<int>(0, 15) > 0;
  const size_t bytes = fits ? size : data->ConsumeIntegralInRange<size_t>(0, 40);
  const uint32_t slot = data->ConsumeIntegralInRange<uint32_t>(0, 3);
  if (kind == kLoadState) return LoadOfZeros(d, index, slot, bytes, number);
  UpdateStep step;
  step.number = data->ConsumeIntegralInRange<uint64_t>(1, 3);
  step.skip = data->ConsumeIntegralInRange<int>(0, 7) == 0;
  step.rates.assign(d.rule->groups.size(), {0.5, 0});
  std::string detail;
  if (kind != kStep) detail.push_back(data->ConsumeIntegralInRange<char>(0, 2));  // the verdict
  if (kind == kReadState) detail.append(reinterpret_cast<const char*>(&slot), sizeof(slot));
  const bool asks = kind == kPushStep || kind == kPushTry || kind == kStep;
  if (asks) detail += step.Pack();
  if (data->ConsumeIntegralInRange<int>(0, 15) == 0) {
    answers->ExpectAnything();
    detail = data->ConsumeRandomLengthString(64);
  }
  const uint32_t round = data->ConsumeIntegralInRange<uint32_t>(0, 3);
  const bool reads = kind == kReadState;
  const std::string body = Header(round, asks || reads ? size : 0) + detail;
  Message request = MakeRequest(kind, 0, d.Key() + index, number, body);
  if (kind == kPushStep || kind == kPushTry || kind == kPushNorm) {
    request.SetValues(Ones(bytes));
  }
  return request;
}

// Returns a RESUME: the rounds with which a worker of a lost server continues.
Message AnyResume(FuzzedDataProvider* data, uint64_t number) {
  WireWriter out;
  const uint32_t count = data->ConsumeIntegralInRange<uint32_t>(0, 3);
  out.Put(data->ConsumeIntegralInRange<int>(0, 15) > 0 ? count : data->ConsumeIntegral<uint32_t>());
  for (uint32_t i = 0; i < count; ++i) {
    out.Put(TheDeclaration(data->ConsumeIntegralInRange<int>(0, kTensors - 1)).Key());
    const bool near = data->ConsumeIntegralInRange<int>(0, 7) > 0;
    out.Put(near ? data->ConsumeIntegralInRange<uint32_t>(0, 3)
                 : data->ConsumeIntegral<uint32_t>());
  }
  return MakeRequest(kResume, 0, 0, number, out.Take());
}

// Reads or loads rounding errors.
Message AnyFeedback(FuzzedDataProvider* data, uint64_t number, const Declaration& d, uint64_t index,
                    uint64_t size) {
  const uint64_t bytes = ValuesIn(d.dtype, size) * sizeof(float);
  const bool reads = data->ConsumeBool();
  Message request = MakeRequest(reads ? kReadState : kLoadState, 0, d.Key() + index, number,
                                Header(0, reads ? bytes : 0));
  if (reads) return request;
  const SharedBytes zeros = SharedBytes::New(bytes);
  memset(zeros.data(), 0, bytes);
  request.SetValues(zeros);
  return request;
}

Message AnyRequest(FuzzedDataProvider* data, uint64_t number, Answers* answers) {
  const int op = data->ConsumeIntegralInRange<int>(0, 16);
  if (op == 13) return AnyResume(data, number);
  if (op < 4) {
    const Declaration d = AnyDeclaration(data);
    std::string body = PackDeclarations({d});
    if (op == 0) body = data->ConsumeRandomLengthString(64);
    return MakeRequest(kDeclare, 0, d.Key(), number, body);
  }
  Declaration d = AnyDeclaration(data);
  const uint64_t index = data->ConsumeIntegralInRange<uint64_t>(0, 3);
  const uint64_t begin = index * d.partition_bytes;
  const uint64_t size =
      std::min<uint64_t>(begin < d.bytes ? d.bytes - begin : SizeOf(d.dtype), d.partition_bytes);
  if (d.rule && data->ConsumeIntegralInRange<int>(0, 7) > 0) {
    return AnyUpdate(data, number, d, index, size, answers);
  }
  if (op == 16 && d.feedback) return AnyFeedback(data, number, d, index, size);
  PushHeader header;
  if (op > 12) header.flags = PushHeader::kKeepsSums;
  header.round = data->ConsumeIntegralInRange<uint32_t>(0, 3);
  header.pull_bytes = static_cast<uint32_t>(size);
  if (data->ConsumeIntegralInRange<int>(0, 7) == 0) {
    header.round = data->ConsumeIntegral<uint32_t>();
    header.pull_offset = data->ConsumeIntegral<uint32_t>();
    header.pull_bytes = data->ConsumeIntegral<uint32_t>();
    header.flags = data->ConsumeIntegral<uint32_t>();
  }
  header.timeout_ms = 60'000;
  // Some earlier rounds have ended at the worker.
  if (number % 2 == 0) header.oldest = header.round;
  std::string body = header.Pack();
  if (data->ConsumeIntegralInRange<int>(0, 15) == 0) body = data->ConsumeRandomLengthString(24);
  const bool gives = op == 14;
  const int kind = op == 12 ? data->ConsumeIntegral<int>() : gives ? kGiveSum : kPushPull;
  if (gives && data->ConsumeBool()) {  // a sum without some members; or the worker had only a part
    if (data->ConsumeBool()) return MakeRequest(kind, 0, d.Key() + index, number, body);
    body.push_back(data->ConsumeIntegralInRange<char>(0, 15));
  }
  Message request = MakeRequest(kind, 0, d.Key() + index, number, body);
  const bool fits = data->ConsumeIntegralInRange<int>(0, 15) > 0;
  request.SetValues(Ones(fits ? size : data->ConsumeIntegralInRange<size_t>(0, 40)));
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

// A server with malformed workers of its job. The workers declare conflicting tensors. They push
// and pull undeclared, twice, out of order or in other sizes, and ask for optimizer steps likewise.
// They give sums of a lost server, and leave in between. Each request is answered at most once, and
// answered sums are right.
extern "C" int Fuzz_server(const uint8_t* bytes, size_t size) {
  FuzzedDataProvider data(bytes, size);
  Answers answers;
  RecoveringServer server(TheConfig(data.ConsumeBool()), &answers);
  uint64_t number = 1;
  const auto ask = [&](Message request, int rank) {
    request.peer = rank;
    answers.WillAsk(rank, number++);
    server.OnMessage(&request);
  };
  // Most requests are about declared tensors.
  for (int which = 0; which < kTensors && data.ConsumeIntegralInRange<int>(0, 15) > 0; ++which) {
    const Declaration d = TheDeclaration(which);
    for (const uint32_t rank : d.group) {
      ask(MakeRequest(kDeclare, 0, d.Key(), number, PackDeclarations({d})), rank);
    }
    if (!d.rule || data.ConsumeIntegralInRange<int>(0, 15) == 0) continue;
    for (uint32_t slot = 0; slot < d.rule->NumSlots(); ++slot) {
      for (uint64_t index = 0; index < d.NumPartitions(); ++index) {
        ask(LoadOfZeros(d, index, slot, d.PartitionSize(index), number), d.group[0]);
      }
    }
  }
  while (data.remaining_bytes() > 0 && number < 200) {
    if (data.ConsumeIntegralInRange<int>(0, 31) == 0) {
      server.OnWorkerGone(data.ConsumeIntegralInRange<int>(0, kWorkers), "it left");
      continue;
    }
    Message request = AnyRequest(&data, number, &answers);
    ask(std::move(request), data.ConsumeIntegralInRange<int>(0, kWorkers));
  }
  return 0;
}

}  // namespace core
}  // namespace byteps
