// Any bytes as what begins a TCP connection, from either side.
#include <cstdint>
#include <string>
#include <vector>

#include "byteps/net/tcp/wire.h"
#include "demand.h"

namespace tcp = ps::tcp;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < tcp::kPreambleBytes) return 0;
  const std::vector<char> bytes(data, data + size);
  if (!tcp::Mismatch(bytes.data()).empty()) return 0;
  if (size >= tcp::kHelloBytes) {
    const std::string again = tcp::DecodeHello(bytes.data()).Encode();
    DEMAND(again.size() == tcp::kHelloBytes);
    DEMAND(tcp::DecodeHello(again.data()).Encode() == again);
  }
  if (size >= tcp::kChallengeBytes) {
    size_t refusal_bytes = 0;
    const tcp::Challenge challenge = tcp::DecodeChallenge(bytes.data(), &refusal_bytes);
    DEMAND(refusal_bytes <= tcp::kMaxRefusalBytes);
    DEMAND(challenge.Encode().size() == tcp::kChallengeBytes);
  }
  if (size >= tcp::kReplyBytes) {
    size_t refusal_bytes = 0;
    const tcp::Reply reply = tcp::DecodeReply(bytes.data(), &refusal_bytes);
    DEMAND(refusal_bytes <= tcp::kMaxRefusalBytes);
    DEMAND(reply.Encode().size() == tcp::kReplyBytes);
  }
  return 0;
}
