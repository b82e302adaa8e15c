// libibverbs and librdmacm, found at run time: a machine without them runs what does not
// ask for RDMA.
#ifndef BYTEPS_NET_RDMA_VERBS_LIBRARY_H_
#define BYTEPS_NET_RDMA_VERBS_LIBRARY_H_

namespace ps {
namespace rdma {

// Loads both libraries, once for the process.  To be called before any ibv_ or rdma_
// function; verbs_library.cc defines those that the van calls and hands each call on.
// Throws Error that names what is missing and the packages that have it.
void LoadVerbsLibraries();

}  // namespace rdma
}  // namespace ps
#endif  // BYTEPS_NET_RDMA_VERBS_LIBRARY_H_
