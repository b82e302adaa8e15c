// Libraries of RDMA, loaded at run time, and owners of their objects.
#ifndef BYTEPS_NET_RDMA_VERBS_H_
#define BYTEPS_NET_RDMA_VERBS_H_

#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>

#include <memory>
#include <string>

namespace ps {
namespace rdma {

// libibverbs and librdmacm, found at run time: a machine without them runs what does not
// ask for RDMA.

// Loads both libraries, once for the process.  To be called before any ibv_ or rdma_
// function; verbs_library.cc defines those that the van calls and hands each call on.
// Throws Error that names what is missing and the packages that have it.
void LoadVerbsLibraries();

// Owners of verbs objects, and errors in words.

// Error: "what: reason (errno)".
[[noreturn]] void Throw(const std::string& what, int error);

// "transport retry counter exceeded (status 12, vendor 0x81)"
std::string Describe(const ibv_wc& wc);

struct Deleter {
  void operator()(ibv_pd* pd) const { ibv_dealloc_pd(pd); }
  void operator()(ibv_cq* cq) const { ibv_destroy_cq(cq); }
  void operator()(ibv_qp* qp) const { ibv_destroy_qp(qp); }
  void operator()(ibv_mr* mr) const { ibv_dereg_mr(mr); }
  void operator()(ibv_comp_channel* channel) const { ibv_destroy_comp_channel(channel); }
  void operator()(rdma_event_channel* channel) const { rdma_destroy_event_channel(channel); }
  void operator()(rdma_cm_id* id) const { rdma_destroy_id(id); }
};
template <typename T>
using Owned = std::unique_ptr<T, Deleter>;

// How memory of values is registered.  Their bytes may come in any order, which many a machine is
// faster at; what tells that they are there comes behind them.  An older kernel ignores it.
constexpr int kValueAccess =
    IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_RELAXED_ORDERING;

}  // namespace rdma
}  // namespace ps

#endif  // BYTEPS_NET_RDMA_VERBS_H_
