// Protocol between workers and servers: declarations, keys, requests, values, and update rules.
#ifndef BYTEPS_BASE_PROTOCOL_H_
#define BYTEPS_BASE_PROTOCOL_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "byteps/base/dtype.h"
#include "byteps/base/rank_group.h"

namespace byteps {
namespace core {

// Rule by which servers update a tensor of parameters from its reduced gradients. It is a part of
// the tensor's declaration.
//
// On the wire, little-endian: u8 algorithm, u8 speculative, u8 counts_zeros, u8 held, u32 groups,
// each: u64 times 3, the bits of beta1, beta2 and eps, and u8 nesterov; u32 segments, each: u64
// end, u32 group, u8 counted.
struct UpdateRule {
  // The numbers are part of the protocol.
  enum Algorithm : uint8_t { kAdamW = 1, kSgd = 2 };

  // Parameters with the same rule. For SGD, beta1 is the momentum, beta2 the dampening.
  struct Group {
    double beta1 = 0;
    double beta2 = 0;
    double eps = 0;
    bool nesterov = false;
    bool operator==(const Group&) const = default;
  };

  // The elements from the previous segment's end (0 for the first segment) up to `end`.
  struct Segment {
    uint64_t end = 0;
    uint32_t group = 0;
    // Whether GradientSums include the gradients of these elements. If several tensors hold copies
    // of a parameter, only one copy is counted.
    bool counted = true;
    bool operator==(const Segment&) const = default;
  };

  Algorithm algorithm = kAdamW;
  // Whether steps may be speculative (PUSH_TRY). The server then keeps the gradients until a step
  // is decided.
  bool speculative = false;
  // Whether GradientSums count the gradients that are zero.
  bool counts_zeros = false;
  // Type of the parameters that workers hold, for gradients in blocks.
  DType held = DType::kFloat32;
  std::vector<Group> groups;
  // Segments in ascending order. Their ends are in values; the last one is the tensor's end.
  std::vector<Segment> segments;

  // Returns the number of fp32 values that a server keeps for each parameter: the parameter, and
  // its moments or momentum.
  uint32_t NumSlots() const;
  // Returns text such as "AdamW of 2 groups, 12 bytes of state a parameter". For a speculative rule
  // it adds ", and its gradient until a step is kept".
  std::string Describe() const;
  std::string Pack() const;
  // Returns false if `text` is not a rule for a tensor with this many values.
  static bool Unpack(const std::string& text, uint64_t values, UpdateRule* rule);
  bool operator==(const UpdateRule&) const = default;
};

// Sums over a partition's counted reduced gradients. On the wire: fp64, little-endian.
struct GradientSums {
  // Sum of squares; not finite if any gradient, even an uncounted one, is not finite.
  double squares = 0;
  double zeros = 0;  // number of zeros, if the rule counts them
};
static_assert(sizeof(GradientSums) == 16);

// Whether a member keeps its last speculative step. The numbers are part of the protocol.
enum class Verdict : uint8_t {
  kNone = 0,  // there was no speculative step, or the member has already given its verdict
  kKeep = 1,  // the step is kept
  kDrop = 2,  // the state remains as before the step
};

// Step of an optimizer. All members of the group send the same.
//
// On the wire, little-endian: u64 number, u64 bits of grad_scale, u8 skip, u32 rates, each: u64
// times 2, the bits of the learning rate and of the weight decay.
struct UpdateStep {
  struct Rate {
    double learning_rate = 0;
    double weight_decay = 0;
    bool operator==(const Rate&) const = default;
  };

  uint64_t number = 1;  // counts from 1; skipped steps do not count
  double grad_scale = 1;
  bool skip = false;        // whether nothing is updated
  std::vector<Rate> rates;  // by group

  // Returns text such as "step 3 with learning rates 0.1, 0.05, weight decays 0.1, 0, gradients
  // times 1".
  std::string Describe() const;
  std::string Pack() const;
  // Returns false if `text` is not a step.
  static bool Unpack(const std::string& text, UpdateStep* step);
};

// Messages between workers and servers.
//
// Each exchange is a request and a response, which are Messages (cluster/channel.h):
//   op          the Op
//   number      the worker's number of the request
//   key         key of the tensor or partition
//   body        of DECLARE: a DeclarationList
//               of other requests: a PushHeader, and what follows it
//               of a failed response: the reason
//               of responses to PUSH_PULL, PUSH_STEP, PUSH_TRY and STEP: PackMembers of the members
//               that the sum lacks, if any; for PUSH_TRY after the sum's GradientSums
//   failed      of a response: whether the request failed
//   values      of PUSH_PULL, PUSH_STEP, PUSH_NORM, PUSH_TRY: the values
//               of LOAD_STATE, and of the response to READ_STATE: fp32 values
//               of responses to PUSH_PULL, PUSH_STEP, PUSH_TRY and STEP: the requested range of the
//               sum or of the updated parameters
//               of the response to PUSH_NORM: the sum's GradientSums
//
// All-reduce: a partition of a tensor without a rule is sent by PUSH_PULL, which is answered when
// the sum is complete.
//
// Updates: a tensor whose declaration has an UpdateRule holds gradients; servers keep its
// parameters. PUSH_STEP is like PUSH_PULL, with an UpdateStep after the header; the answer has the
// updated parameters. If the norm of all gradients is needed first, two requests do the same:
// PUSH_NORM, answered when the sum is complete, and STEP with the UpdateStep. LOAD_STATE and
// READ_STATE, with the slot as u32 after the header, write and read the kept state. Without a slot
// they write and read the rounding errors of a tensor that is summed in blocks with feedback.
//
// Blocks: for gradients in blocks of few bits, servers answer with differences in 8-bit blocks,
// which a worker adds to its parameters (AddDifferences, base/block_codec.h). Servers also keep the
// workers' parameters, in an extra, last slot. A completed step changes that slot, and so does
// LOAD_STATE of slot 0, which sets it to the same parameters, rounded.
//
// Speculative steps: PUSH_TRY, if the rule allows it, is like PUSH_STEP, but leaves the state
// unchanged. The answer has the parameters after the step, and the GradientSums. Each member then
// decides: STEP makes another step from the same gradients; otherwise its next PUSH_STEP,
// PUSH_NORM, PUSH_TRY or READ_STATE has a Verdict, as u8 directly after the header. So a kept step
// costs no message.
//
// Lost servers: if another server may replace a lost one, pushes have kKeepsSums, and the answer to
// a PUSH_PULL begins with KeptAnswer. A worker that has nothing to push reports by CONFIRM, with
// PushHeader::confirmed as u64; the answer has KeptAnswer::with_all as u64. After a worker has
// declared all tensors to a new server, it sends RESUME with the rounds that it may still refer to:
// a u32 count, then for each tensor its key as u64 and its first round as u32. GIVE_SUM hands over
// one of the worker's sums. After the header it has PackMembers of the members that the sum lacks.
// It has no values if the worker had asked only for a part. The answer has the round as u32, and
// the sum's serial as u64, which is 0 if no member lacks the sum. When all GIVE_SUMs are answered,
// the worker pushes again.
//
// Freeing: RELEASE, with a u32 count and u64 keys of tensors, says that the worker no longer uses
// these tensors, and that its requests about them have ended. A server frees a tensor when no
// worker uses it. It answers a RELEASE when it has freed all tensors of that RELEASE. The next
// tensor with the same name has another key.
//
// Backups: with BYTEPS_BACKUP_STATE, server r + 1 (modulo the number of servers) is the backup of
// server r, its primary: it has a copy of the primary's state. recovery/server/backup_link.h
// describes the messages between the two.
//
// Keys: a tensor's key is a hash of its name, of the number of earlier tensors with this name, and
// of its group's lowest rank, shifted left by 16. A partition's key is the tensor's key plus the
// partition's index. So keys depend neither on the order of declarations nor on the number of
// ranks. If members disagree on anything else in a declaration, or if two names have the same hash,
// the server gets different declarations with the same key, and refuses them.

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
  kRelease = 15,
  kConfirm = 16,
};

// Values of BYTEPS_KEY_HASH_FN. The numbers are part of the protocol.
enum class KeyHash : uint8_t { kRaw = 0, kDjb2 = 1 };
constexpr uint8_t kNumKeyHashes = 2;

// Returns the name used in BYTEPS_KEY_HASH_FN.
const char* NameOf(KeyHash hash);

constexpr int kPartitionBits = 16;
constexpr uint64_t kMaxPartitions = 1ull << kPartitionBits;
// Flag in a placement: a single server has all partitions. The flag is part of the protocol.
constexpr uint64_t kOnOneServer = 1ull << 63;

// Limits of the wait for members of slow replicas (docs/design/replicas.md).
struct Patience {
  uint32_t replica_ranks = 0;  // workers per replica; 0: there is only one replica, and no limit
  // Once `quorum` replicas have pushed, the other replicas have `grace_ms` milliseconds left to
  // push. With quorum 0 they have as long as an all-reduce may take.
  uint32_t quorum = 0;
  uint32_t grace_ms = 0;

  bool operator==(const Patience& other) const = default;
  // Returns text such as "quorum 2@1.5".
  std::string Describe() const;
};

// Tensor that is reduced. All members of its group must agree on everything here.
struct Declaration {
  std::string name;
  uint32_t releases = 0;  // number of earlier tensors with this name that were released
  DType dtype = DType::kFloat32;
  bool average = false;
  // Whether servers add pushes in the order of ranks instead of arrival, so that a repeated sum has
  // the same bits. BYTEPS_DETERMINISTIC=1 on a server does the same for all tensors.
  bool in_order = false;
  // With blocks (base/block_codec.h): whether servers add a sum's rounding errors to the next sum.
  bool feedback = false;
  // With blocks: whether workers and servers round stochastically (BYTEPS_STOCHASTIC_ROUNDING).
  bool stochastic = false;
  uint64_t bytes = 0;
  uint32_t partition_bytes = 0;
  // With kRaw, partition p is on server (placement + p) mod servers. If `placement` includes
  // kOnOneServer, every partition is on server placement mod servers, whatever the hash.
  uint64_t placement = 0;
  KeyHash hash = KeyHash::kRaw;  // maps partitions to servers
  Patience patience;             // the same for all tensors of a job
  RankGroup group;
  std::shared_ptr<const UpdateRule> rule;  // null: the tensor is only reduced

  uint64_t Key() const;
  // Returns the key of the first tensor with this name, whatever the number of releases.
  uint64_t KeyOfName() const;
  uint64_t NumPartitions() const { return (bytes + partition_bytes - 1) / partition_bytes; }
  // Returns the bytes of partition `index`.
  uint64_t PartitionSize(uint64_t index) const;
  // Limit of rounds that a worker may have pushed but not completed: as many as hold 1 GiB (16 to
  // 1,024).
  uint32_t MostRoundsOpen() const;
  // Returns the values in partition `index`.
  uint64_t PartitionValues(uint64_t index) const { return ValuesIn(dtype, PartitionSize(index)); }
  // Number of slots for LOAD_STATE and READ_STATE. Requires a rule.
  uint32_t NumSlots() const { return rule->NumSlots() + (IsBlock(dtype) ? 1 : 0); }
  // Returns the index of `rank` in the group, or -1.
  int MemberIndex(uint32_t rank) const;

  // Returns text such as "float32, 400 bytes, sum over ranks 0,1".
  std::string Describe() const;
  bool operator==(const Declaration& other) const;
};

// Header of a request about a partition. On the wire: these fields in this order, little-endian.
struct PushHeader {
  uint32_t round = 0;        // number of this worker's earlier pushes of this tensor
  uint32_t timeout_ms = 0;   // limit of the worker's wait
  uint32_t pull_offset = 0;  // start, in bytes, of the range of the sum that the worker wants
  uint32_t pull_bytes = 0;   // length of that range; may be 0
  // The tensor's first open round at the worker, at most `round`. Earlier rounds have ended at the
  // worker, which will not push or ask for them again.
  uint32_t oldest = 0;
  // kForgetLost and kKeepsSums. All members set the same flags.
  uint32_t flags = 0;
  // With kKeepsSums: the worker has this server's answers to all requests with lower numbers.
  uint64_t confirmed = 0;
  // The server does not add earlier rounding errors to this partition's sum.
  static constexpr uint32_t kForgetLost = 1;
  // The worker keeps the sum until all members have it.
  static constexpr uint32_t kKeepsSums = 2;
  static constexpr size_t kBytes = 6 * sizeof(uint32_t) + sizeof(uint64_t);

  std::string Pack() const;
  // Returns false if `text` is not a header.
  static bool Unpack(const std::string& text, PushHeader* header);
  // Unpacks a header with more data after it, which goes to *rest.
  static bool Unpack(const std::string& text, PushHeader* header, std::string* rest);
};

// Part of the answer to a worker that keeps the sum (kKeepsSums). On the wire: these fields in this
// order, little-endian.
struct KeptAnswer {
  uint32_t ended = 0;     // the tensor's rounds below this number have ended at all members
  uint64_t serial = 0;    // number of this sum among the sums of this server
  uint64_t with_all = 0;  // sums of this server with lower serials have reached all their members
  static constexpr size_t kBytes = sizeof(uint32_t) + 2 * sizeof(uint64_t);

  std::string Pack() const;
  // Removes a KeptAnswer from the front of `text`. Returns false if `text` is too short.
  static bool Take(std::string* text, KeptAnswer* answer);
};

// Packs the members (by index) whose values a sum lacks, as one bit each, lowest first. Returns ""
// if the sum lacks no member.
std::string PackMembers(const std::vector<bool>& members);
// Returns the indices of the members that `text` packs, for a group of `size` members.
std::vector<size_t> UnpackMembers(const std::string& text, size_t size);

// Returns the 64-bit FNV-1a hash of the bytes.
uint64_t HashBytes(const void* data, size_t size, uint64_t seed);

// List of declarations, sent in a message.
//
// On the wire, all numbers little-endian:
//   u8  version, kDeclarationVersion   u8  BYTEPS_KEY_HASH_FN (KeyHash)
//   u32 groups, each:                  u32 members, then a u32 per rank, ascending
//   u32 tensors, each:                 u8  dtype     u8  flags: 1 = average, 2 = has a rule,
//                                                    4 = feedback, 8 = stochastic rounding,
//                                                    16 = in the order of ranks
//                                      u64 bytes     u32 partition bytes   u64 placement
//                                      u32 group, an index into the groups above
//                                      u32 releases
//                                      u32 length of the name, then the name
//                                      if it has a rule: u32 its length, then the UpdateRule

constexpr uint8_t kDeclarationVersion = 9;

// Packs declarations. `hash` must be equal in all of them.
std::string PackDeclarations(const std::vector<Declaration>& declarations);

// Returns false if `text` is not a list of declarations, with the reason in *error. Safe for any
// bytes: every count and length is checked. `groups`: shares groups with earlier lists; may be
// null.
bool UnpackDeclarations(const std::string& text, std::vector<Declaration>* declarations,
                        std::string* error, RankGroups* groups = nullptr);

// Parses a choice of BYTEPS_KEY_HASH_FN.
KeyHash ParseKeyHash(const std::string& name);

// Returns the server, 0..num_servers-1, of partition `index` of the tensor with `key`
// (Declaration::Key).
//
// kRaw assigns partitions round robin from the tensor's `placement`. If each tensor's placement is
// the number of partitions before it, small tensors and parts of large ones are spread evenly over
// any number of servers. kDjb2 hashes the partition's key. A placement with kOnOneServer
// gives all partitions to one server, as for a shard whose owner is on that server's host.
int ServerOf(KeyHash hash, uint64_t key, uint64_t placement, uint64_t index, int num_servers);

// Returns the partition size for a tensor of `bytes` bytes.
//
// All workers push a partition at the same time, and a server has the sum only when it has received
// all pushes. Until then the server sends nothing. To keep that time short, each server gets
// kPartitionsPerServer partitions of a tensor, if these stay within the limits `smallest` and
// `largest`, and at most kMaxPartitions in total if `largest` allows. Limits and result are whole
// pages. Partitions of blocks are multiples of kBlocksOfPartition blocks, which are whole pages of
// 4 KiB. If `largest` is less, a partition has as many whole blocks as fit.
//
// If `smallest` is 0, the lower limit is the number of bytes that the link carries in
// kShortestSeconds, between kLeastSmallest and kMostSmallest. For an unknown link it is
// kMostSmallest. Small partitions help on slow links: a tensor waits once for its first partition
// and once for its last, and 128 KiB take 10 ms at 100 Mbit/s.
//
// Partitions are longer on fast links. Each partition costs CPU time, of which kPartitionSeconds
// are not hidden behind the links, and links idle for the time of one partition. For n bytes per
// server, the total is least with partitions of sqrt(n * rate * kPartitionSeconds) bytes.
// `link_bytes_per_s`: rate of a worker's link; 0: unknown.
constexpr uint64_t kPartitionsPerServer = 64;
constexpr double kPartitionSeconds = 2e-6;
constexpr double kShortestSeconds = 2.5e-3;
constexpr uint64_t kLeastSmallest = 32 << 10;
constexpr uint64_t kMostSmallest = 128 << 10;
constexpr uint32_t kBlocksOfPartition = 2048;
uint32_t PartitionBytes(DType dtype, uint64_t bytes, int num_servers, double link_bytes_per_s,
                        uint32_t smallest, uint32_t largest);

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_BASE_PROTOCOL_H_
