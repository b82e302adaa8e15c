// Any bytes as what RDMA connections carry: requests, replies and refusals, frames, targets.
#include <cstdint>
#include <string>
#include <vector>

#include "byteps/net/rdma/wire.h"
#include "demand.h"

namespace rdma = ps::rdma;

namespace {

// Whatever is believed would be sent the same way again.
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

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::vector<char> bytes(data, data + size);
  const bool ours = rdma::Mismatch(bytes.data(), bytes.size()).empty();
  if (ours) Try<rdma::ConnectRequest>(bytes);
  if (ours) Try<rdma::ConnectReply>(bytes);
  if (ours) Try<rdma::Challenge>(bytes);
  Try<rdma::Refusal>(bytes);
  Try<rdma::FrameHeader>(bytes);
  Try<rdma::Target>(bytes);
  Try<rdma::Resume>(bytes);
  return 0;
}
