// Bytes that two TCP connections exchange.
//
//   connecting side                               listening side
//     | -- Hello: its identity, a nonce ---------------> |
//     | <-- Challenge: its identity, a nonce, a proof -- |
//     | -- a proof ------------------------------------> |
//     | <-- Reply: takes the connection or refuses it -- |
//
// A proof (net/auth/secret.h) covers the Hello, and the Challenge up to the Challenge's proof. So a
// proof is valid only for this connection, these two processes, this job and these roles. The proof
// in the Reply also covers the Reply. In a job without a secret the proofs are checksums. Challenge
// and Reply may refuse the connection. The reason then follows, and the connection closes.
//
// link/admission.h defines the meaning of a failed greeting.
//
// Then each side sends frames:
//
//   type u8 | values u8 | 0 u16 | meta bytes u32 | received u64 |
//       bytes of each value u64 ... | meta | values
//
// All fields are little-endian. The first six bytes of Hello, Challenge and Reply are the same in
// every version.
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
  // Number of the job and generation; 0: unknown, which only the scheduler accepts.
  uint64_t job = 0;
  uint64_t sender = 0;    // token of the process that connects
  uint64_t receiver = 0;  // token of the process that it wants to reach; 0: unknown
  int32_t node_id = 0;    // the sender's node id; Node::kEmpty before it has joined
  int32_t rank = -1;      // the rank that the sender will have; -1: the scheduler decides
  uint8_t role = 0;       // the sender's Node::Role
  uint16_t index = 0;     // index of the connection, among those of the two nodes
  bool authenticates = false;
  bool resumes = false;   // whether this connection existed before, and broke
  uint64_t received = 0;  // number of messages that the sender has received over this connection
  std::string nonce;      // auth::kNonceBytes
  // Greeting that both ends have proved. It is not sent. The Reply's proof begins with it.
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
  std::string refusal;  // reason to refuse the connection; "": not refused

  // Returns the bytes that the proofs cover after the Hello.
  std::string Claims() const;
  std::string Encode() const;
};
// Size of an encoded Challenge, without the refusal.
constexpr size_t kChallengeBytes = 96;

struct Reply {
  uint64_t received = 0;  // number of messages that this side has received over the connection
  std::string proof;      // auth::kProofBytes
  std::string refusal;    // reason to refuse the connection; "": accepted

  // Returns the bytes that the proof covers in addition to Hello and Challenge.
  std::string Claims() const;
  std::string Encode() const;
};
// Size of an encoded Reply, without the refusal.
constexpr size_t kReplyBytes = 48;
constexpr size_t kMaxRefusalBytes = 1024;

// Returns the bytes that reject a peer whose greeting starts with `data` (at least kPreambleBytes);
// "" if its protocol and version match.
constexpr size_t kPreambleBytes = 6;
std::string Mismatch(const char* data);
// Returns whether `data` is the start of TLS.
bool LooksEncrypted(const char* data);

// Decodes a Hello of this version. `data`: kHelloBytes bytes.
Hello DecodeHello(const char* data);
// Decodes a Challenge of this version. `data`: kChallengeBytes bytes. Sets `refusal_bytes` to the
// number of bytes of the refusal that follows.
Challenge DecodeChallenge(const char* data, size_t* refusal_bytes);
// Decodes a Reply of this version. `data`: kReplyBytes bytes. Sets `refusal_bytes` to the number of
// bytes of the refusal that follows.
Reply DecodeReply(const char* data, size_t* refusal_bytes);

// Labels for the sender of a proof. Each proof also covers its label.
extern const char kWhoConnects[];
extern const char kWhoListens[];
extern const char kWhoReplies[];

enum FrameType : uint8_t {
  kMessage = 1,
  kGoodbye = 2,   // no content; the connection will be closed in order
  kReceived = 3,  // no content; an acknowledgement
};

struct FrameHeader {
  FrameType type = kMessage;
  uint8_t values = 0;
  uint32_t meta_bytes = 0;
  uint64_t received = 0;  // number of messages that the frame's sender has received so far

  std::string Encode() const;
};
constexpr size_t kFrameHeaderBytes = 16;
// Offset of `received` in the header.
constexpr size_t kReceivedOffset = 8;
// Limits of a message's values. No message of this project exceeds them, and a frame that claims
// more is invalid.
constexpr size_t kMaxValues = 16;
constexpr uint64_t kMaxValueBytes = 1ull << 32;

// Decodes a header. `data`: kFrameHeaderBytes bytes. Returns false if they are not a header.
bool DecodeFrameHeader(const char* data, FrameHeader* header);

}  // namespace tcp
}  // namespace ps
#endif  // BYTEPS_NET_TCP_WIRE_H_
