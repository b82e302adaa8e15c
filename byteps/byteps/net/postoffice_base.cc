// The part of ps-lite's Postoffice that a job needs: it starts and stops the van of this process's
// role.
#include "byteps/net/net_settings.h"
#include "ps/base.h"
#include "ps/internal/postoffice.h"

namespace ps {

void Postoffice::Start(const NetSettings& settings, int customer_id) {
  using byteps::core::Role;
  // Finalize has already stopped the last job's van.
  van_.reset(Van::Create(settings));
  num_workers_ = settings.van.membership.workers;
  num_servers_ = settings.van.membership.servers;
  is_worker_ = settings.role == Role::kWorker;
  is_server_ = settings.role == Role::kServer;
  is_scheduler_ = settings.role == Role::kScheduler;
  verbose_ = settings.verbose;
  try {
    van_->Start(customer_id, false);
  } catch (...) {
    // Stops the parts that have started, so that the caller may try again.
    Finalize(customer_id, false);
    throw;
  }
}

void Postoffice::Finalize(const int /*customer_id*/, const bool /*do_barrier*/) { van_->Stop(); }

}  // namespace ps
