// What workers and servers say to each other.
//
// Each exchange is one request and one response, Messages of cluster/message.h:
//   op          the Op                number    the request's (worker's own)
//   key         the tensor's or partition's
//   body        DECLARE: a DeclarationList; all others: a PushHeader, and what follows it; failed
//               response: the reason; response to PUSH_TRY: the sum's GradientSums, and as that to
//               PUSH_PULL, PUSH_STEP and STEP, PackMembers of those that the sum lacks, if any
//   failed      of a response
//   values      of PUSH_PULL, PUSH_STEP, PUSH_NORM, PUSH_TRY: the values; of LOAD_STATE:
//               fp32 values
//               of the responses to PUSH_PULL, PUSH_STEP, PUSH_TRY and STEP: the part of the
//               sum, or of the updated parameters, that was asked for; to PUSH_NORM: the sum's
//               GradientSums; to READ_STATE: fp32 values
//
// A partition of a tensor that is only summed goes by one PUSH_PULL, which is answered when the sum
// is complete.
//
// A tensor whose declaration has an UpdateRule holds gradients, and servers keep its parameters.
// PUSH_STEP is as PUSH_PULL, with an UpdateStep after the header; the answer has the updated
// parameters.  The same in two turns, for who has to know the norm of all gradients first:
// PUSH_NORM, answered when the sum is there, and STEP, with the UpdateStep.  LOAD_STATE and
// READ_STATE, with the slot as a u32 after the header, write and read what is kept.  Without a slot
// they do the same of a tensor that is summed in blocks with feedback: of what rounding has lost.
//
// Gradients in blocks of few bits are answered with differences, in blocks of 8 bits: what a worker
// adds to the parameters that it holds (AddDifferences, base/block_codec.h).  Servers keep what
// workers hold, as one more slot, the last.  It changes by a step that is made, as the parameters
// do, and by LOAD_STATE: that of slot 0 sets it to the same parameters, rounded.
//
// PUSH_TRY, where the rule is speculative, is as PUSH_STEP, but the state stays as it is: the
// answer has the parameters as the step would make them, and the GradientSums.  What becomes of the
// step each member says next: either by STEP, which makes another step of the same gradients, or by
// a Verdict, a u8 that follows the header of PUSH_STEP, PUSH_NORM, PUSH_TRY and READ_STATE, before
// all else.  So a step that stands costs no message.
//
// Where another server may take the place of one that is lost, pushes have kKeepsSums, and the
// answer to a PUSH_PULL begins with a u32: rounds of the tensor before it have ended at all
// members.  To a server that comes a worker says, once it has declared all tensors, by RESUME which
// rounds it may still speak of: a u32 count, then for each tensor its key as a u64 and the first
// round as a u32. By GIVE_SUM it gives it the sums that it has, with PackMembers of those that they
// lack after the header; without values, where it wanted a part alone.  It pushes again when all
// are answered.
//
// Servers.  Where BYTEPS_BACKUP_STATE is set, server r + 1 (modulo their number), its backup, has a
// copy of the state of server r, the primary.  What they say to each other: server/backup_link.h.
//
// Keys.  A tensor's key is a hash of its name and of its group's lowest rank,
// shifted left by 16; a partition's adds its index.  It thus depends neither on
// the order in which ranks declare tensors nor on their number, and members that
// disagree on anything else, or two names with one hash, meet on the server,
// which compares their declarations and refuses.
#ifndef BYTEPS_BASE_PROTOCOL_H_
#define BYTEPS_BASE_PROTOCOL_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "byteps/base/dtype.h"
#include "byteps/base/update_rule.h"

namespace byteps {
namespace core {

enum Op : int {
  kDeclare = 1,
  kPushPull = 2,
  kPushStep = 3,
  kPushNorm = 4,
  kPushTry = 5,
  kStep = 6,
  kLoadState = 7,
  kReadState = 8,
  kResume = 9,
  kGiveSum = 10,
  kMeet = 11,
  kFetch = 12,
  kFetched = 13,
  kCopy = 14,
};

// BYTEPS_KEY_HASH_FN.  The numbers are part of the protocol.
enum class KeyHash : uint8_t { kRaw = 0, kDjb2 = 1 };
constexpr uint8_t kNumKeyHashes = 2;

// As BYTEPS_KEY_HASH_FN spells it.
const char* NameOf(KeyHash hash);

constexpr int kPartitionBits = 16;
constexpr uint64_t kMaxPartitions = 1ull << kPartitionBits;

// What the members of a group must agree on before they sum a tensor.
// How long members of some replicas wait for those of others (docs/design/replicas.md).
struct Patience {
  uint32_t replica_ranks = 0;  // workers of each replica; 0: there is one, and nothing to be done
  // Once so many replicas have pushed, the others have so long; 0: as long as a sum may take.
  uint32_t quorum = 0;
  uint32_t grace_ms = 0;

  bool operator==(const Patience& other) const = default;
  // "BYTEPS_QUORUM=2, BYTEPS_GRACE_S=1.5"
  std::string Describe() const;
};

struct Declaration {
  std::string name;
  DType dtype = DType::kFloat32;
  bool average = false;
  // Of blocks (base/block_codec.h): servers keep what rounding loses of a sum for the next one.
  bool feedback = false;
  // Of blocks: workers and servers round by chance (BYTEPS_STOCHASTIC_ROUNDING).
  bool stochastic = false;
  uint64_t bytes = 0;
  uint32_t partition_bytes = 0;
  uint64_t placement =
      0;  // the server of partition p is (placement + p) mod servers, when hashed raw
  KeyHash hash = KeyHash::kRaw;            // how partitions are dealt to servers
  Patience patience;                       // the same of all tensors of a job
  std::vector<uint32_t> group;             // ranks, ascending
  std::shared_ptr<const UpdateRule> rule;  // null: it is summed, and no more

  uint64_t Key() const;
  uint64_t NumPartitions() const { return (bytes + partition_bytes - 1) / partition_bytes; }
  // Bytes of partition `index`.
  uint64_t PartitionSize(uint64_t index) const;
  // Values of partition `index`.
  uint64_t PartitionValues(uint64_t index) const { return ValuesIn(dtype, PartitionSize(index)); }
  // Of one with a rule: what LOAD_STATE and READ_STATE may name.
  uint32_t NumSlots() const { return rule->NumSlots() + (IsBlock(dtype) ? 1 : 0); }
  // Position of `rank` in the group, or -1.
  int MemberIndex(uint32_t rank) const;

  // "float32, 400 bytes, sum over ranks 0,1"
  std::string Describe() const;
  bool operator==(const Declaration& other) const;
};

// On the wire its fields, little-endian, in this order.
struct PushHeader {
  uint32_t round = 0;        // how often this tensor was pushed before by this worker
  uint32_t timeout_ms = 0;   // for how long the worker will wait
  uint32_t pull_offset = 0;  // the part of the partition's sum that it wants back,
  uint32_t pull_bytes = 0;   // perhaps nothing
  // The first round of this tensor that has not ended at the worker, not after `round`.  What it
  // has left open of those before has failed there, and it will neither push nor ask again.
  uint32_t oldest = 0;
  // kForgetLost and kKeepsSums, the same from all members; or nothing.
  uint32_t flags = 0;
  // What rounding lost of this partition's sums before is not added to this one.
  static constexpr uint32_t kForgetLost = 1;
  // The worker keeps the sum until all have it.
  static constexpr uint32_t kKeepsSums = 2;
  static constexpr size_t kBytes = 6 * sizeof(uint32_t);

  std::string Pack() const;
  // False when `text` is no header.
  static bool Unpack(const std::string& text, PushHeader* header);
  // Of a header with something after it, which becomes *rest.
  static bool Unpack(const std::string& text, PushHeader* header, std::string* rest);
};

// Members of a group, by index, as an answer names those whose values its sum lacks: a bit each,
// lowest first.  Empty where there are none.
std::string PackMembers(const std::vector<bool>& members);
// The indices, of a group of `size`.
std::vector<size_t> UnpackMembers(const std::string& text, size_t size);

// FNV-1a, 64 bits.
uint64_t HashBytes(const void* data, size_t size, uint64_t seed);

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_BASE_PROTOCOL_H_
