#include "byteps/cluster/node_ids.h"

#include "ps/internal/postoffice.h"

namespace byteps {
namespace core {

int WorkerId(int rank) { return ps::Postoffice::WorkerRankToID(rank); }
int ServerId(int rank) { return ps::Postoffice::ServerRankToID(rank); }
int RankOf(int node_id) { return ps::Postoffice::IDtoRank(node_id); }
bool IsWorker(int node_id) { return node_id % 2 == WorkerId(0) % 2; }

}  // namespace core
}  // namespace byteps
