// RDMA libraries, which are loaded at run time, and owners of their objects.
#ifndef BYTEPS_NET_RDMA_VERBS_H_
#define BYTEPS_NET_RDMA_VERBS_H_

#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>

#include <memory>
#include <string>

namespace ps {
namespace rdma {

// Loads libibverbs and librdmacm once per process, so that everything except RDMA runs without
// them. Call this before any ibv_ or rdma_ function. verbs_library.cc defines the functions that
// are used, and forwards them. Throws Error that says what is missing, and in which packages it is.
void LoadVerbsLibraries();

// Throws Error "what: reason (errno)".
[[noreturn]] void Throw(const std::string& what, int error);

// Returns text such as "transport retry counter exceeded (status 12, vendor 0x81)".
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

// Access flags for values. Relaxed ordering, which is faster on many machines, lets the bytes of a
// value arrive in any order. The notification still arrives after them. Older kernels ignore
// IBV_ACCESS_RELAXED_ORDERING.
constexpr int kValueAccess =
    IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_RELAXED_ORDERING;

}  // namespace rdma
}  // namespace ps

#endif  // BYTEPS_NET_RDMA_VERBS_H_
