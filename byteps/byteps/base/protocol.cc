#include "byteps/base/protocol.h"

#include <algorithm>
#include <cstdio>

#include "byteps/base/wire.h"

namespace byteps {
namespace core {

uint64_t HashBytes(const void* data, size_t size, uint64_t seed) {
  uint64_t hash = 14695981039346656037ull ^ seed;
  const auto* p = static_cast<const unsigned char*>(data);
  for (size_t i = 0; i < size; ++i) hash = (hash ^ p[i]) * 1099511628211ull;
  return hash;
}

const char* NameOf(KeyHash hash) {
  static const char* const kNames[] = {"raw", "djb2"};
  return kNames[static_cast<size_t>(hash)];
}

uint64_t Declaration::Key() const {
  const uint32_t lowest = group.empty() ? 0 : group.front();
  const uint64_t hash = HashBytes(name.data(), name.size(), HashBytes(&lowest, sizeof(lowest), 0));
  return hash << kPartitionBits;
}

uint64_t Declaration::PartitionSize(uint64_t index) const {
  return std::min<uint64_t>(partition_bytes, bytes - index * partition_bytes);
}

int Declaration::MemberIndex(uint32_t rank) const {
  const auto it = std::lower_bound(group.begin(), group.end(), rank);
  if (it == group.end() || *it != rank) return -1;
  return static_cast<int>(it - group.begin());
}

std::string Declaration::Describe() const {
  std::string ranks;
  for (uint32_t rank : group) ranks += (ranks.empty() ? "" : ",") + std::to_string(rank);
  return std::string(NameOf(dtype)) + ", " + std::to_string(bytes) + " bytes in partitions of " +
         std::to_string(partition_bytes) + ", " + (average ? "average" : "sum") +
         (feedback ? " with feedback" : "") + (stochastic ? ", rounded by chance," : "") +
         " over ranks " + ranks + ", placement " + std::to_string(placement) +
         (hash == KeyHash::kRaw
              ? ""
              : std::string(", dealt by BYTEPS_KEY_HASH_FN=") + byteps::core::NameOf(hash)) +
         (patience.quorum > 0 ? ", " + patience.Describe() : "") +
         (rule ? ", updated by " + rule->Describe() : "");
}

std::string Patience::Describe() const {
  char text[64];
  snprintf(text, sizeof(text), "BYTEPS_QUORUM=%u, BYTEPS_GRACE_S=%g", quorum, grace_ms / 1e3);
  return text;
}

std::string PushHeader::Pack() const {
  WireWriter out;
  for (uint32_t field : {round, timeout_ms, pull_offset, pull_bytes, oldest, flags}) out.Put(field);
  return out.Take();
}

std::string PackMembers(const std::vector<bool>& members) {
  std::string text((members.size() + 7) / 8, '\0');
  for (size_t i = 0; i < members.size(); ++i) {
    if (members[i]) text[i / 8] = static_cast<char>(text[i / 8] | (1 << (i % 8)));
  }
  return text;
}

std::vector<size_t> UnpackMembers(const std::string& text, size_t size) {
  std::vector<size_t> members;
  for (size_t i = 0; i < std::min(size, text.size() * 8); ++i) {
    if (((static_cast<unsigned char>(text[i / 8]) >> (i % 8)) & 1) != 0) members.push_back(i);
  }
  return members;
}

bool PushHeader::Unpack(const std::string& text, PushHeader* header) {
  WireReader in(text);
  for (uint32_t* field : {&header->round, &header->timeout_ms, &header->pull_offset,
                          &header->pull_bytes, &header->oldest, &header->flags}) {
    *field = in.Get<uint32_t>();
  }
  return in.ok() && in.at_end();
}

bool PushHeader::Unpack(const std::string& text, PushHeader* header, std::string* rest) {
  if (text.size() < kBytes) return false;
  *rest = text.substr(kBytes);
  return Unpack(text.substr(0, kBytes), header);
}

bool Declaration::operator==(const Declaration& o) const {
  return name == o.name && dtype == o.dtype && average == o.average && feedback == o.feedback &&
         stochastic == o.stochastic && bytes == o.bytes && partition_bytes == o.partition_bytes &&
         placement == o.placement && hash == o.hash && patience == o.patience && group == o.group &&
         (rule == o.rule || (rule && o.rule && *rule == *o.rule));
}

}  // namespace core
}  // namespace byteps
