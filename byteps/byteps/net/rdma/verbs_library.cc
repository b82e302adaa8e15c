#include <dlfcn.h>
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>

#include <string>

#include "byteps/base/invariant.h"
#include "byteps/net/rdma/verbs.h"

// Inline functions of the verbs headers call these functions by name. Those calls must reach the
// definitions below.
#undef ibv_query_port
#undef ibv_reg_mr

#define PS_VERBS_FUNCTIONS(X) \
  X(ibv_fork_init)            \
  X(ibv_get_device_list)      \
  X(ibv_free_device_list)     \
  X(ibv_get_device_name)      \
  X(ibv_open_device)          \
  X(ibv_close_device)         \
  X(ibv_query_device)         \
  X(ibv_query_port)           \
  X(ibv_query_gid)            \
  X(ibv_get_async_event)      \
  X(ibv_ack_async_event)      \
  X(ibv_event_type_str)       \
  X(ibv_wc_status_str)        \
  X(ibv_alloc_pd)             \
  X(ibv_dealloc_pd)           \
  X(ibv_reg_mr)               \
  X(ibv_reg_mr_iova2)         \
  X(ibv_dereg_mr)             \
  X(ibv_create_comp_channel)  \
  X(ibv_destroy_comp_channel) \
  X(ibv_create_cq)            \
  X(ibv_destroy_cq)           \
  X(ibv_get_cq_event)         \
  X(ibv_ack_cq_events)        \
  X(ibv_create_qp)            \
  X(ibv_destroy_qp)           \
  X(ibv_modify_qp)

#define PS_RDMACM_FUNCTIONS(X)  \
  X(rdma_create_event_channel)  \
  X(rdma_destroy_event_channel) \
  X(rdma_create_id)             \
  X(rdma_destroy_id)            \
  X(rdma_bind_addr)             \
  X(rdma_resolve_addr)          \
  X(rdma_resolve_route)         \
  X(rdma_connect)               \
  X(rdma_establish)             \
  X(rdma_listen)                \
  X(rdma_accept)                \
  X(rdma_reject)                \
  X(rdma_disconnect)            \
  X(rdma_get_cm_event)          \
  X(rdma_ack_cm_event)          \
  X(rdma_get_src_port)          \
  X(rdma_event_str)             \
  X(rdma_set_option)            \
  X(rdma_init_qp_attr)

namespace ps {
namespace rdma {
namespace {

// Pointers to the library's functions, with the types in its header.
struct Functions {
#define X(name) decltype(&::name) name = nullptr;
  PS_VERBS_FUNCTIONS(X)
  PS_RDMACM_FUNCTIONS(X)
#undef X
};
Functions functions;

void* Open(const char* library) {
  // The library is never closed, because device drivers keep state.
  void* handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* reason = dlerror();
    throw Error(std::string("RDMA needs libibverbs.so.1 and librdmacm.so.1 (Debian and "
                            "Ubuntu: apt-get install libibverbs1 librdmacm1 "
                            "ibverbs-providers): ") +
                (reason != nullptr ? reason : library));
  }
  return handle;
}

template <typename Function>
void Find(void* handle, const char* library, const char* name, Function* function) {
  // Symbols of loaded libraries come first, so that a preloaded library can intercept calls.
  void* address = dlsym(RTLD_DEFAULT, name);
  if (address == nullptr) address = dlsym(handle, name);
  if (address == nullptr) {
    throw Error(std::string(library) + " has no " + name +
                ": it is too old for RDMA; install rdma-core 20 or newer");
  }
  *reinterpret_cast<void**>(function) = address;
}

bool Load() {
  void* verbs = Open("libibverbs.so.1");
  void* rdmacm = Open("librdmacm.so.1");
#define X(name) Find(verbs, "libibverbs.so.1", #name, &functions.name);
  PS_VERBS_FUNCTIONS(X)
#undef X
#define X(name) Find(rdmacm, "librdmacm.so.1", #name, &functions.name);
  PS_RDMACM_FUNCTIONS(X)
#undef X
  return true;
}

}  // namespace

void LoadVerbsLibraries() {
  static const bool loaded = Load();  // after an exception the next call tries again
  (void)loaded;
}

}  // namespace rdma
}  // namespace ps

// The functions that the van calls. They are hidden (-fvisibility=hidden), so no other library uses
// them.
extern "C" {

int ibv_fork_init(void) { return ps::rdma::functions.ibv_fork_init(); }

ibv_device** ibv_get_device_list(int* count) {
  return ps::rdma::functions.ibv_get_device_list(count);
}

void ibv_free_device_list(ibv_device** list) { ps::rdma::functions.ibv_free_device_list(list); }

const char* ibv_get_device_name(ibv_device* device) {
  return ps::rdma::functions.ibv_get_device_name(device);
}

ibv_context* ibv_open_device(ibv_device* device) {
  return ps::rdma::functions.ibv_open_device(device);
}

int ibv_close_device(ibv_context* context) { return ps::rdma::functions.ibv_close_device(context); }

int ibv_query_device(ibv_context* context, ibv_device_attr* attributes) {
  return ps::rdma::functions.ibv_query_device(context, attributes);
}

int ibv_query_port(ibv_context* context, uint8_t port, _compat_ibv_port_attr* attributes) {
  return ps::rdma::functions.ibv_query_port(context, port, attributes);
}

int ibv_query_gid(ibv_context* context, uint8_t port, int index, ibv_gid* gid) {
  return ps::rdma::functions.ibv_query_gid(context, port, index, gid);
}

int ibv_get_async_event(ibv_context* context, ibv_async_event* event) {
  return ps::rdma::functions.ibv_get_async_event(context, event);
}

void ibv_ack_async_event(ibv_async_event* event) { ps::rdma::functions.ibv_ack_async_event(event); }

const char* ibv_event_type_str(ibv_event_type event) {
  return ps::rdma::functions.ibv_event_type_str(event);
}

const char* ibv_wc_status_str(ibv_wc_status status) {
  return ps::rdma::functions.ibv_wc_status_str(status);
}

ibv_pd* ibv_alloc_pd(ibv_context* context) { return ps::rdma::functions.ibv_alloc_pd(context); }

int ibv_dealloc_pd(ibv_pd* pd) { return ps::rdma::functions.ibv_dealloc_pd(pd); }

ibv_mr* ibv_reg_mr(ibv_pd* pd, void* address, size_t bytes, int access) {
  return ps::rdma::functions.ibv_reg_mr(pd, address, bytes, access);
}

ibv_mr* ibv_reg_mr_iova2(ibv_pd* pd, void* address, size_t bytes, uint64_t iova, unsigned access) {
  return ps::rdma::functions.ibv_reg_mr_iova2(pd, address, bytes, iova, access);
}

int ibv_dereg_mr(ibv_mr* mr) { return ps::rdma::functions.ibv_dereg_mr(mr); }

ibv_comp_channel* ibv_create_comp_channel(ibv_context* context) {
  return ps::rdma::functions.ibv_create_comp_channel(context);
}

int ibv_destroy_comp_channel(ibv_comp_channel* channel) {
  return ps::rdma::functions.ibv_destroy_comp_channel(channel);
}

ibv_cq* ibv_create_cq(ibv_context* context, int size, void* of, ibv_comp_channel* channel,
                      int vector) {
  return ps::rdma::functions.ibv_create_cq(context, size, of, channel, vector);
}

int ibv_destroy_cq(ibv_cq* cq) { return ps::rdma::functions.ibv_destroy_cq(cq); }

int ibv_get_cq_event(ibv_comp_channel* channel, ibv_cq** cq, void** of) {
  return ps::rdma::functions.ibv_get_cq_event(channel, cq, of);
}

void ibv_ack_cq_events(ibv_cq* cq, unsigned count) {
  ps::rdma::functions.ibv_ack_cq_events(cq, count);
}

ibv_qp* ibv_create_qp(ibv_pd* pd, ibv_qp_init_attr* attributes) {
  return ps::rdma::functions.ibv_create_qp(pd, attributes);
}

int ibv_destroy_qp(ibv_qp* qp) { return ps::rdma::functions.ibv_destroy_qp(qp); }

int ibv_modify_qp(ibv_qp* qp, ibv_qp_attr* attributes, int mask) {
  return ps::rdma::functions.ibv_modify_qp(qp, attributes, mask);
}

rdma_event_channel* rdma_create_event_channel(void) {
  return ps::rdma::functions.rdma_create_event_channel();
}

void rdma_destroy_event_channel(rdma_event_channel* channel) {
  ps::rdma::functions.rdma_destroy_event_channel(channel);
}

int rdma_create_id(rdma_event_channel* channel, rdma_cm_id** id, void* of, rdma_port_space space) {
  return ps::rdma::functions.rdma_create_id(channel, id, of, space);
}

int rdma_destroy_id(rdma_cm_id* id) { return ps::rdma::functions.rdma_destroy_id(id); }

int rdma_bind_addr(rdma_cm_id* id, sockaddr* address) {
  return ps::rdma::functions.rdma_bind_addr(id, address);
}

int rdma_resolve_addr(rdma_cm_id* id, sockaddr* from, sockaddr* to, int timeout_ms) {
  return ps::rdma::functions.rdma_resolve_addr(id, from, to, timeout_ms);
}

int rdma_resolve_route(rdma_cm_id* id, int timeout_ms) {
  return ps::rdma::functions.rdma_resolve_route(id, timeout_ms);
}

int rdma_connect(rdma_cm_id* id, rdma_conn_param* parameters) {
  return ps::rdma::functions.rdma_connect(id, parameters);
}

int rdma_establish(rdma_cm_id* id) { return ps::rdma::functions.rdma_establish(id); }

int rdma_listen(rdma_cm_id* id, int backlog) {
  return ps::rdma::functions.rdma_listen(id, backlog);
}

int rdma_accept(rdma_cm_id* id, rdma_conn_param* parameters) {
  return ps::rdma::functions.rdma_accept(id, parameters);
}

int rdma_reject(rdma_cm_id* id, const void* data, uint8_t bytes) {
  return ps::rdma::functions.rdma_reject(id, data, bytes);
}

int rdma_disconnect(rdma_cm_id* id) { return ps::rdma::functions.rdma_disconnect(id); }

int rdma_get_cm_event(rdma_event_channel* channel, rdma_cm_event** event) {
  return ps::rdma::functions.rdma_get_cm_event(channel, event);
}

int rdma_ack_cm_event(rdma_cm_event* event) { return ps::rdma::functions.rdma_ack_cm_event(event); }

__be16 rdma_get_src_port(rdma_cm_id* id) { return ps::rdma::functions.rdma_get_src_port(id); }

const char* rdma_event_str(rdma_cm_event_type event) {
  return ps::rdma::functions.rdma_event_str(event);
}

int rdma_set_option(rdma_cm_id* id, int level, int option, void* value, size_t bytes) {
  return ps::rdma::functions.rdma_set_option(id, level, option, value, bytes);
}

int rdma_init_qp_attr(rdma_cm_id* id, ibv_qp_attr* attributes, int* mask) {
  return ps::rdma::functions.rdma_init_qp_attr(id, attributes, mask);
}

}  // extern "C"
