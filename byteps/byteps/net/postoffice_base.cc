// What a job needs of the Postoffice: the van of this process's role, started and stopped.
#include "ps/base.h"
#include "ps/internal/postoffice.h"

namespace ps {

Postoffice::Postoffice() { env_ref_ = Environment::_GetSharedRef(); }

void Postoffice::InitEnvironment() {
  // Finalize stopped the last job's van.
  van_.reset(Van::Create(GetEnv("DMLC_ENABLE_RDMA", "tcp")));
  num_workers_ = GetEnv("DMLC_NUM_WORKER", 0);
  num_servers_ = GetEnv("DMLC_NUM_SERVER", 0);
  const std::string role = GetEnv("DMLC_ROLE", "");
  is_worker_ = role == "worker";
  is_server_ = role == "server";
  is_scheduler_ = role == "scheduler";
  verbose_ = GetEnv("PS_VERBOSE", 0);
}

void Postoffice::Start(int customer_id, const char* /*argv0*/, const bool /*do_barrier*/) {
  InitEnvironment();
  try {
    van_->Start(customer_id, false);
  } catch (...) {
    // Leave nothing half started, so that the caller may try again.
    Finalize(customer_id, false);
    throw;
  }
}

void Postoffice::Finalize(const int /*customer_id*/, const bool /*do_barrier*/) { van_->Stop(); }

}  // namespace ps
