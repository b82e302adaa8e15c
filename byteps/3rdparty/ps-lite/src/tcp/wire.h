// What two TCP connections say to each other, byte for byte.
//
// Who connects sends a Hello; who accepted it answers with a HelloReply, which takes or
// refuses it.  Then each side sends frames:
//
//   type u8 | values u8 | 0 u16 | meta bytes u32 | bytes of each value u64 ... | meta | values
//
// All fields are little endian.  The first six bytes of Hello and HelloReply are the same in
// every version.
#ifndef PS_TCP_WIRE_H_
#define PS_TCP_WIRE_H_

#include <cstddef>
#include <cstdint>
#include <string>

namespace ps {
namespace tcp {

constexpr uint32_t kMagic = 0x5350424d;  // "MBPS"
constexpr uint16_t kVersion = 2;

struct Hello {
  uint64_t job = 0;       // 0: not known yet, to the scheduler alone
  uint64_t sender = 0;    // names the process that asks
  uint64_t receiver = 0;  // names the process that is meant; 0: not known yet
  int32_t node_id = 0;    // of the sender; Node::kEmpty before it has joined
  uint16_t index = 0;     // among the connections of the pair

  std::string Encode() const;
};
constexpr size_t kHelloBytes = 40;

struct HelloReply {
  uint64_t job = 0;
  uint64_t sender = 0;
  std::string refusal;  // empty: taken

  std::string Encode() const;
};
// Without the refusal.
constexpr size_t kHelloReplyBytes = 24;
constexpr size_t kMaxRefusalBytes = 1024;

// What a peer that begins so must be told; "" if it speaks as we do.  `data` has at least
// kPreambleBytes.
constexpr size_t kPreambleBytes = 6;
std::string Mismatch(const char* data);

// `data` has kHelloBytes, of our version.
Hello DecodeHello(const char* data);
// `data` has kHelloReplyBytes, of our version; `refusal_bytes` more follow.
HelloReply DecodeHelloReply(const char* data, size_t* refusal_bytes);

enum FrameType : uint8_t {
  kMessage = 1,
  kGoodbye = 2,  // nothing follows; the connection will be closed in good order
};

struct FrameHeader {
  FrameType type = kMessage;
  uint8_t values = 0;
  uint32_t meta_bytes = 0;
};
constexpr size_t kFrameHeaderBytes = 8;
// More than any message of ours has; a frame that claims more is not believed.
constexpr size_t kMaxValues = 16;
constexpr uint64_t kMaxValueBytes = 1ull << 32;

// False if the bytes are no header.  `data` has kFrameHeaderBytes.
bool DecodeFrameHeader(const char* data, FrameHeader* header);

}  // namespace tcp
}  // namespace ps
#endif  // PS_TCP_WIRE_H_
