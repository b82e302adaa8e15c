#include "byteps/net/link/nic_settings.h"

#include "byteps/net/link/rdma_choice.h"

namespace ps {

using byteps::core::Config;
using byteps::core::LocalPlace;

NicSettings NicSettings::From(const Config& config) {
  NicSettings settings;
  settings.names = config.String("BYTEPS_NICS");
  settings.uses_rdma = UsesRdma(config);
  settings.names_address =
      !config.String("DMLC_NODE_HOST").empty() || !config.String("DMLC_INTERFACE").empty();
  settings.chooses_rdma_device = !RdmaChoice::Parse(config.String("BYTEPS_RDMA_DEVICE")).is_any();
  const LocalPlace place = LocalPlace::From(config);
  settings.local_rank = place.rank;
  settings.local_size = place.size;
  return settings;
}

}  // namespace ps
