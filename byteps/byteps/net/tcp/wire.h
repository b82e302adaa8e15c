// What two TCP connections say to each other, byte for byte.
//
//   who connects                                  who listens
//     | -- Hello: who it is, a nonce ------------------> |
//     | <-- Challenge: who it is, a nonce, a proof ----- |
//     | -- a proof ------------------------------------> |
//     | <-- Reply: takes the connection or refuses it -- |
//
// A proof (net/auth/secret.h) is over the Hello and the Challenge up to its proof, so that it is of
// use for this connection alone, between these two processes, in this job and these roles.  That
// of the Reply is over what it says, too.  In a job without a secret the proofs are checksums.
// Either answer may refuse; then a reason follows it and the connection closes.
//
// What a failed greeting means: see link/admission.h.
//
// Then each side sends frames:
//
//   type u8 | values u8 | 0 u16 | meta bytes u32 | received u64 |
//       bytes of each value u64 ... | meta | values
//
// All fields are little endian.  The first six bytes of Hello, Challenge and Reply are the same
// in every version.
#ifndef BYTEPS_NET_TCP_WIRE_H_
#define BYTEPS_NET_TCP_WIRE_H_

#include <cstddef>
#include <cstdint>
#include <string>

namespace ps {
namespace tcp {

constexpr uint32_t kMagic = 0x5350424d;  // "MBPS"
constexpr uint16_t kVersion = 5;

struct Hello {
  uint64_t job = 0;       // and its generation; 0: not known yet, to the scheduler alone
  uint64_t sender = 0;    // names the process that asks
  uint64_t receiver = 0;  // names the process that is meant; 0: not known yet
  int32_t node_id = 0;    // of the sender; Node::kEmpty before it has joined
  int32_t rank = -1;      // that the sender will join as; -1: whatever the scheduler says
  uint8_t role = 0;       // a Node::Role, of the sender
  uint16_t index = 0;     // among the connections of the pair
  bool authenticates = false;
  bool resumes = false;   // this connection was there before, and broke
  uint64_t received = 0;  // messages that came whole over it
  std::string nonce;      // auth::kNonceBytes
  // Not sent: what both ends have said when it is proved.  The proof of the Reply begins with it.
  std::string said;

  std::string Encode() const;
};
constexpr size_t kHelloBytes = 88;

struct Challenge {
  uint64_t job = 0;
  uint64_t sender = 0;
  bool authenticates = false;
  std::string nonce;    // auth::kNonceBytes
  std::string proof;    // auth::kProofBytes
  std::string refusal;  // empty: none

  // What the proofs are over, behind the Hello.
  std::string Claims() const;
  std::string Encode() const;
};
// Without the refusal.
constexpr size_t kChallengeBytes = 96;

struct Reply {
  uint64_t received = 0;  // messages that came whole over the connection that broke
  std::string proof;      // auth::kProofBytes
  std::string refusal;    // empty: taken

  // What its proof is over, behind what was said before.
  std::string Claims() const;
  std::string Encode() const;
};
// Without the refusal.
constexpr size_t kReplyBytes = 48;
constexpr size_t kMaxRefusalBytes = 1024;

// What a peer that begins so must be told; "" if it speaks as we do.  `data` has at least
// kPreambleBytes.
constexpr size_t kPreambleBytes = 6;
std::string Mismatch(const char* data);
// Whether that is how TLS begins.
bool LooksEncrypted(const char* data);

// `data` has kHelloBytes, of our version.
Hello DecodeHello(const char* data);
// `data` has kChallengeBytes, of our version; `refusal_bytes` more follow.
Challenge DecodeChallenge(const char* data, size_t* refusal_bytes);
// `data` has kReplyBytes, of our version; `refusal_bytes` more follow.
Reply DecodeReply(const char* data, size_t* refusal_bytes);

// Who proves what, in a proof.
extern const char kWhoConnects[];
extern const char kWhoListens[];
extern const char kWhoReplies[];

enum FrameType : uint8_t {
  kMessage = 1,
  kGoodbye = 2,   // nothing follows; the connection will be closed in good order
  kReceived = 3,  // nothing follows; tells what came
};

struct FrameHeader {
  FrameType type = kMessage;
  uint8_t values = 0;
  uint32_t meta_bytes = 0;
  uint64_t received = 0;  // messages that came whole the other way, since the beginning

  std::string Encode() const;
};
constexpr size_t kFrameHeaderBytes = 16;
// Where `received` lies in it.
constexpr size_t kReceivedOffset = 8;
// More than any message of ours has; a frame that claims more is not believed.
constexpr size_t kMaxValues = 16;
constexpr uint64_t kMaxValueBytes = 1ull << 32;

// False if the bytes are no header.  `data` has kFrameHeaderBytes.
bool DecodeFrameHeader(const char* data, FrameHeader* header);

}  // namespace tcp
}  // namespace ps
#endif  // BYTEPS_NET_TCP_WIRE_H_
