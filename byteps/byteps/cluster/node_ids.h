// Ids of nodes, by which ps-lite addresses messages (ps_message.cc), and their ranks.
#ifndef BYTEPS_CLUSTER_NODE_IDS_H_
#define BYTEPS_CLUSTER_NODE_IDS_H_

namespace byteps {
namespace core {

int WorkerId(int rank);
int ServerId(int rank);

// Of an id that one of the two above returned.
int RankOf(int node_id);
bool IsWorker(int node_id);

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_CLUSTER_NODE_IDS_H_
