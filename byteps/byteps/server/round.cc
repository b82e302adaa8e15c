#include "byteps/server/round.h"

#include "byteps/base/process.h"

namespace byteps {
namespace core {

PushHeader HeaderOf(const Message& message) {
  PushHeader header;
  std::string rest;
  PushHeader::Unpack(message.body, &header, &rest);
  return header;
}

Caller CallerOf(const Message& message, int64_t received) {
  const PushHeader header = HeaderOf(message);
  const int64_t now = SteadyNs();
  return {message.peer,
          message.number,
          message.op,
          header.pull_offset,
          header.pull_bytes,
          (header.flags & PushHeader::kKeepsSums) != 0,
          received,
          now,
          now};
}

}  // namespace core
}  // namespace byteps
