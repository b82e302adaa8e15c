#include "byteps/engine/plan.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "byteps/base/invariant.h"
#include "byteps/base/protocol.h"

namespace byteps {
namespace core {
namespace {

uint32_t WholePages(uint64_t bytes) {
  const uint64_t page = sysconf(_SC_PAGESIZE);
  return static_cast<uint32_t>((bytes + page - 1) / page * page);
}

// Limit of a partition's state in bytes per slot: a single message carries a slot.
constexpr uint64_t kMostStateBytes = 1 << 30;

void CheckRule(const Declaration& d) {
  if (!IsUpdated(d.dtype)) {
    throw UsageError(
        "servers update by gradients of float32, bfloat16, float16, int8x128 and int4x128; '" +
        d.name + "' is " + NameOf(d.dtype));
  }
  if (d.feedback) {
    throw UsageError("servers update by the sum of '" + d.name +
                     "' without rounding it: there is nothing for them to feed back");
  }
  if (ValuesIn(d.dtype, d.partition_bytes) * sizeof(float) > kMostStateBytes) {
    throw UsageError("a partition of '" + d.name +
                     "' has more than 1 GiB of fp32 parameters: " + "lower BYTEPS_PARTITION_BYTES");
  }
}

constexpr double kMostGraceS = 604800;

Patience PatienceOf(const Config& config, const Launch& launch) {
  Patience patience;
  if (launch.replicas > 1) patience.replica_ranks = launch.size / launch.replicas;
  const std::string& text = config.String("BYTEPS_QUORUM");
  if (text.empty()) return patience;
  int quorum = 0;
  double grace_s = 0;
  char rest = 0;
  if (sscanf(text.c_str(), "%9d@%lf%c", &quorum, &grace_s, &rest) != 2 || quorum < 1 ||
      !(grace_s > 0 && grace_s <= kMostGraceS)) {
    throw UsageError("the quorum '" + text +
                     "' is not REPLICAS@SECONDS: with 3@60, once three replicas wait, the others "
                     "have a minute");
  }
  if (quorum >= launch.replicas) {
    throw UsageError("the quorum " + text + " must be of fewer than the " +
                     std::to_string(launch.replicas) +
                     " replicas of the job (BYTEPS_REPLICA): there must be one to wait for");
  }
  patience.quorum = static_cast<uint32_t>(quorum);
  patience.grace_ms = static_cast<uint32_t>(std::max(grace_s * 1000, 1.0));
  return patience;
}

}  // namespace

Plan::Plan(const Config& config, const Launch& launch, int num_servers)
    : launch_(launch),
      all_(RankGroup::Below(launch.size)),
      num_servers_(num_servers),
      smallest_partition_(WholePages(config.Int("BYTEPS_MIN_PARTITION_BYTES"))),
      largest_partition_(WholePages(config.Int("BYTEPS_PARTITION_BYTES"))),
      stochastic_(config.Bool("BYTEPS_STOCHASTIC_ROUNDING")),
      patience_(PatienceOf(config, launch)),
      hash_(ParseKeyHash(config.String("BYTEPS_KEY_HASH_FN"))) {}

uint32_t Plan::PartitionBytes(DType dtype, uint64_t bytes, uint64_t piece_of, bool updated) const {
  // The answer may be longer than the pushed values.
  const uint64_t most =
      updated ? largest_partition_ * SizeOf(dtype) / SizeOf(AnswerOf(dtype)) : largest_partition_;
  return core::PartitionBytes(dtype, std::max(bytes, piece_of), num_servers_, link_bytes_per_s_,
                              smallest_partition_, static_cast<uint32_t>(most));
}

Declaration Plan::Declare(const TensorSpec& spec) const {
  Declaration d;
  d.name = spec.name;
  d.dtype = spec.dtype;
  d.average = spec.average;
  d.in_order = spec.in_order;
  d.hash = hash_;
  d.patience = patience_;
  d.bytes = spec.bytes;
  d.feedback = spec.feedback;
  d.stochastic = stochastic_ && IsBlock(spec.dtype);
  d.partition_bytes = PartitionBytes(d.dtype, d.bytes, spec.piece_of, spec.rule != nullptr);
  d.group = spec.group.empty() ? all_ : spec.group;
  d.rule = spec.rule;
  d.placement = spec.placement.value_or(d.KeyOfName() >> kPartitionBits);
  if (d.MemberIndex(launch_.rank) < 0) {
    throw UsageError("rank " + std::to_string(launch_.rank) + " is no member of the group of '" +
                     d.name + "': " + d.Describe());
  }
  if (static_cast<int>(d.group.back()) >= launch_.size) {
    throw UsageError("the group of '" + d.name + "' has rank " + std::to_string(d.group.back()) +
                     ", there are " + std::to_string(launch_.size) + " workers");
  }
  if (d.NumPartitions() > kMaxPartitions) {  // BYTEPS_PARTITION_BYTES is too small
    throw UsageError("'" + d.name + "' of " + std::to_string(d.bytes) + " bytes has " +
                     std::to_string(d.NumPartitions()) + " partitions, at most " +
                     std::to_string(kMaxPartitions) +
                     " are possible: raise BYTEPS_PARTITION_BYTES");
  }
  if (d.rule) CheckRule(d);
  return d;
}

Plan::Layout Plan::LayOut(const Declaration& d) const {
  Layout layout;
  layout.rank = launch_.rank;
  const uint64_t key = d.Key();
  const int k = num_servers_;
  // Distance of a partition's server from the worker's first server.
  std::vector<int> distance(d.NumPartitions());
  for (uint64_t i = 0; i < distance.size(); ++i) {
    layout.servers.push_back(ServerOf(hash_, key, d.placement, i, k));
    layout.order.push_back(static_cast<uint32_t>(i));
    distance[i] = (layout.servers.back() + k - launch_.rank % k) % k;
  }
  for (auto begin = layout.order.begin(); begin != layout.order.end();) {
    const auto end = layout.order.end() - begin > k ? begin + k : layout.order.end();
    std::stable_sort(begin, end, [&](auto a, auto b) { return distance[a] < distance[b]; });
    begin = end;
  }
  return layout;
}

std::vector<uint64_t> Plan::BytesPerServer(const TensorSpec& spec) const {
  const Declaration d = Declare(spec);
  const Layout layout = LayOut(d);
  std::vector<uint64_t> bytes(num_servers_);
  for (uint64_t i = 0; i < d.NumPartitions(); ++i) bytes[layout.servers[i]] += d.PartitionSize(i);
  return bytes;
}

}  // namespace core
}  // namespace byteps
