// What workers and servers say to each other: declarations, keys, requests, values, and the rules
// by which servers update parameters.
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

// What servers are told of an optimizer: once, how parameters are updated, and with each step, by
// how much.

// How a tensor of parameters is updated from its summed gradients.  A part of its declaration.
//
// On the wire, little-endian: u8 algorithm, u8 speculative, u8 counts_zeros, u8 held, u32 groups,
// each: u64 times 3, the bits of beta1, beta2 and eps, and u8 nesterov; u32 segments, each: u64
// end, u32 group, u8 counted.
struct UpdateRule {
  // The numbers are part of the protocol.
  enum Algorithm : uint8_t { kAdamW = 1, kSgd = 2 };

  // Parameters that are updated alike.  Of SGD, beta1 is the momentum, beta2 its dampening.
  struct Group {
    double beta1 = 0;
    double beta2 = 0;
    double eps = 0;
    bool nesterov = false;
    bool operator==(const Group&) const = default;
  };

  // Elements from the end of the segment before, or 0, up to `end`.
  struct Segment {
    uint64_t end = 0;
    uint32_t group = 0;
    // In GradientSums.  Of a parameter that several tensors hold, one copy is.
    bool counted = true;
    bool operator==(const Segment&) const = default;
  };

  Algorithm algorithm = kAdamW;
  // Steps may be tried (PUSH_TRY): the server keeps the gradients until it hears what becomes of
  // them.
  bool speculative = false;
  // GradientSums tell how many gradients are 0.
  bool counts_zeros = false;
  // Of gradients in blocks: the type in which workers hold the parameters.
  DType held = DType::kFloat32;
  std::vector<Group> groups;
  // Of values, ascending; the last one ends with the tensor.
  std::vector<Segment> segments;

  // fp32 values kept for each parameter: the parameter itself, and its moments or momentum.
  uint32_t NumSlots() const;
  // "AdamW of 2 groups, 12 bytes of state a parameter"; of one that is speculative ", and its
  // gradient until a step is kept" as well
  std::string Describe() const;
  std::string Pack() const;
  // False when `text` is no rule for a tensor of so many values.
  static bool Unpack(const std::string& text, uint64_t values, UpdateRule* rule);
  bool operator==(const UpdateRule&) const = default;
};

// Of the summed gradients of a partition that count.  As it is on the wire: fp64, little-endian.
struct GradientSums {
  double squares = 0;  // added up; no finite number if any gradient is none, counted or not
  double zeros = 0;    // how many are 0, if the rule counts them
};
static_assert(sizeof(GradientSums) == 16);

// What becomes of the step that a member tried last.  The numbers are part of the protocol.
enum class Verdict : uint8_t {
  kNone = 0,  // it tried none, or has said so already
  kKeep = 1,  // it stands
  kDrop = 2,  // the state stays as it was before
};

// One step of an optimizer, as all members of the group say it.
//
// On the wire, little-endian: u64 number, u64 bits of grad_scale, u8 skip, u32 rates, each: u64
// times 2, the bits of the learning rate and of the weight decay.
struct UpdateStep {
  struct Rate {
    double learning_rate = 0;
    double weight_decay = 0;
    bool operator==(const Rate&) const = default;
  };

  uint64_t number = 1;  // the first one is 1; steps that are skipped are not counted
  double grad_scale = 1;
  bool skip = false;        // nothing is updated
  std::vector<Rate> rates;  // by group

  // "step 3 with learning rates 0.1, 0.05, weight decays 0.1, 0, gradients times 1"
  std::string Describe() const;
  std::string Pack() const;
  // False when `text` is no step.
  static bool Unpack(const std::string& text, UpdateStep* step);
};

// What workers and servers say to each other.
//
// Each exchange is one request and one response, Messages of cluster/channel.h:
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
// answer to a PUSH_PULL begins with KeptAnswer.  A worker that has nothing to push says by CONFIRM,
// with a u64 as PushHeader::confirmed, what it has; the answer has KeptAnswer::with_all as a u64.
// To a server that comes a worker says, once it has declared all tensors, by RESUME which
// rounds it may still speak of: a u32 count, then for each tensor its key as a u64 and the first
// round as a u32. By GIVE_SUM it gives it the sums that it has, with PackMembers of those that they
// lack after the header; without values, where it wanted a part alone.  The answer has the round as
// a u32 and the sum's serial as a u64, 0 if no member lacks it.  It pushes again when all are
// answered.
//
// RELEASE, with a u32 count and keys of tensors as u64, says that a worker holds them no more: what
// it had asked about them has ended.  A server frees a tensor once nobody holds it, and answers
// when it has freed them all.  The next tensor of that name has another key.
//
// Servers.  Where BYTEPS_BACKUP_STATE is set, server r + 1 (modulo their number), its backup, has a
// copy of the state of server r, the primary.  What they say to each other:
// recovery/server/backup_link.h.
//
// Keys.  A tensor's key is a hash of its name, of its life, and of its group's lowest rank,
// shifted left by 16; a partition's adds its index.  It thus depends neither on
// the order in which ranks declare tensors nor on their number, and members that
// disagree on anything else, or two names with one hash, meet on the server,
// which compares their declarations and refuses.

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
  // "quorum 2@1.5"
  std::string Describe() const;
};

struct Declaration {
  std::string name;
  uint32_t life = 0;  // how often members have released a tensor of this name before
  DType dtype = DType::kFloat32;
  bool average = false;
  // Servers add pushes in the order of ranks, not of arrival, so that a sum repeated has the same
  // bits.  BYTEPS_DETERMINISTIC=1 on a server does the same for all tensors.
  bool in_order = false;
  // Of blocks (base/block_codec.h): servers keep what rounding loses of a sum for the next one.
  bool feedback = false;
  // Of blocks: workers and servers round by chance (BYTEPS_STOCHASTIC_ROUNDING).
  bool stochastic = false;
  uint64_t bytes = 0;
  uint32_t partition_bytes = 0;
  uint64_t placement =
      0;  // the server of partition p is (placement + p) mod servers, when hashed raw
  KeyHash hash = KeyHash::kRaw;  // how partitions are dealt to servers
  Patience patience;             // the same of all tensors of a job
  RankGroup group;
  std::shared_ptr<const UpdateRule> rule;  // null: it is summed, and no more

  uint64_t Key() const;
  // The key of the first tensor of this name: the same in each life.
  uint64_t KeyOfName() const;
  uint64_t NumPartitions() const { return (bytes + partition_bytes - 1) / partition_bytes; }
  // Bytes of partition `index`.
  uint64_t PartitionSize(uint64_t index) const;
  // How many rounds of it a worker may have pushed that have not ended there: as many as hold 1
  // GiB, 16 at least and 1,024 at most.
  uint32_t MostRoundsOpen() const;
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
  // With kKeepsSums: the worker has the answers of this server to all its requests before it.
  uint64_t confirmed = 0;
  // What rounding lost of this partition's sums before is not added to this one.
  static constexpr uint32_t kForgetLost = 1;
  // The worker keeps the sum until all have it.
  static constexpr uint32_t kKeepsSums = 2;
  static constexpr size_t kBytes = 6 * sizeof(uint32_t) + sizeof(uint64_t);

  std::string Pack() const;
  // False when `text` is no header.
  static bool Unpack(const std::string& text, PushHeader* header);
  // Of a header with something after it, which becomes *rest.
  static bool Unpack(const std::string& text, PushHeader* header, std::string* rest);
};

// The part of an answer about a sum that its worker keeps.  On the wire: its fields, little-endian,
// in this order.
struct KeptAnswer {
  uint32_t ended = 0;     // rounds of the tensor before it have ended at all members
  uint64_t serial = 0;    // of this sum, among those of this server
  uint64_t with_all = 0;  // sums of this server with serials before it are with all their members
  static constexpr size_t kBytes = sizeof(uint32_t) + 2 * sizeof(uint64_t);

  std::string Pack() const;
  // Takes it from the front of `text`.  False: it is too short.
  static bool Take(std::string* text, KeptAnswer* answer);
};

// Members of a group, by index, as an answer names those whose values its sum lacks: a bit each,
// lowest first.  Empty where there are none.
std::string PackMembers(const std::vector<bool>& members);
// The indices, of a group of `size`.
std::vector<size_t> UnpackMembers(const std::string& text, size_t size);

// FNV-1a, 64 bits.
uint64_t HashBytes(const void* data, size_t size, uint64_t seed);

// Many declarations in one message.
//
// On the wire, all numbers little-endian:
//   u8  version, kDeclarationVersion   u8  BYTEPS_KEY_HASH_FN (KeyHash)
//   u32 groups, each:                  u32 members, then u32 a rank, ascending
//   u32 tensors, each:                 u8  dtype     u8  flags: 1 = average, 2 = has a rule,
//                                                    4 = feedback, 8 = rounded by chance,
//                                                    16 = in the order of ranks
//                                      u64 bytes     u32 partition bytes   u64 placement
//                                      u32 group, an index into the groups above
//                                      u32 life
//                                      u32 length of the name, then the name
//                                      where it has a rule: u32 its length, then the UpdateRule

constexpr uint8_t kDeclarationVersion = 9;

// Declarations that were made with one configuration: `hash` is the same in all.
std::string PackDeclarations(const std::vector<Declaration>& declarations);

// False when `text` is no list of declarations; *error then says why.  Every count and length is
// checked, so that any bytes may be given.  `groups`: where groups of earlier lists are known; may
// be null.
bool UnpackDeclarations(const std::string& text, std::vector<Declaration>* declarations,
                        std::string* error, RankGroups* groups = nullptr);

// How tensors are cut, and which server sums which partition.

// `name` is one of the table's choices.
KeyHash ParseKeyHash(const std::string& name);

// The server, 0..num_servers-1, of partition `index` of the tensor with `key`
// (Declaration::Key).
//
// kRaw deals partitions round robin from the tensor's `placement`: a caller that
// gives each tensor the number of partitions before it spreads small tensors and
// the parts of large ones evenly over any number of servers.  kDjb2 hashes the
// partition's key, whatever its neighbours are.
int ServerOf(KeyHash hash, uint64_t key, uint64_t placement, uint64_t index, int num_servers);

// Bytes of the partitions of a tensor of `bytes` bytes.
//
// All workers push a partition at the same time, so a server has its sum only when
// it has received it from all, and the links back idle until then.  To keep that
// time small compared with the whole, a server gets many partitions of a tensor,
// kPartitionsPerServer of them, as long as they are neither smaller nor larger
// than the given limits.  No more than kMaxPartitions, if the greatest size allows it.
// Limits are whole pages, and so is the result.  Partitions of blocks are multiples of
// kBlocksOfPartition blocks, which are whole pages of 4 KiB; where the greatest size is less than
// that, as many whole blocks as it holds.
//
// `smallest` 0: what the link carries in kShortestSeconds, within kLeastSmallest and kMostSmallest,
// which is also the one for a link that is not known.  All of a tensor waits once for its first
// partition and once for its last.  On a link of 100 Mbit/s one of 128 KiB takes 10 ms.
//
// On fast links they are longer.  Cores take some time for each partition, of which
// kPartitionSeconds are not hidden behind the links; and links idle for as long as they carry one.
// Of n bytes per server the sum of both is least with partitions of
// sqrt(n * rate * kPartitionSeconds) bytes.  `link_bytes_per_s`: of a worker; 0: not known.
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
