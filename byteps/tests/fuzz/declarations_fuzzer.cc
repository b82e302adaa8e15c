// Any bytes as a list of declarations: refused with a reason, or a list that can be summed.
#include <cstdint>
#include <string>
#include <vector>

#include "byteps/base/declaration_list.h"
#include "demand.h"

using byteps::core::Declaration;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  std::vector<Declaration> declarations;
  std::string error;
  if (!byteps::core::UnpackDeclarations(text, &declarations, &error)) {
    DEMAND(!error.empty());
    return 0;
  }
  for (const Declaration& d : declarations) {
    const uint64_t partitions = d.NumPartitions();
    DEMAND(partitions >= 1 && partitions <= byteps::core::kMaxPartitions);
    const uint64_t last = d.PartitionSize(partitions - 1);
    DEMAND(last >= 1 && last <= d.partition_bytes);
    DEMAND((partitions - 1) * d.partition_bytes + last == d.bytes);
    DEMAND(d.Key() % byteps::core::kMaxPartitions == 0);
    DEMAND(d.MemberIndex(d.group.back()) == static_cast<int>(d.group.size()) - 1);
    DEMAND(!d.Describe().empty());
  }
  if (declarations.empty()) return 0;
  std::vector<Declaration> again;
  const std::string packed = byteps::core::PackDeclarations(declarations);
  DEMAND(byteps::core::UnpackDeclarations(packed, &again, &error));
  DEMAND(again == declarations);
  return 0;
}
