// How nodes, limits and numbers of things are called in errors and in the log.
#ifndef BYTEPS_NET_LINK_NODE_TEXT_H_
#define BYTEPS_NET_LINK_NODE_TEXT_H_

#include <chrono>
#include <string>

namespace ps {

struct Node;

// Ids of nodes that are refused: far from those that are admitted.
constexpr int kRefusedBase = 1 << 24;

std::chrono::steady_clock::duration ToDuration(double seconds);

// "30.0 s (BYTEPS_PEER_TIMEOUT_S=30)"
std::string Limit(double seconds, const char* variable);

// "1 worker", "2 workers"
std::string Plural(int n, const char* noun);

// "worker 1", from a node id
std::string RoleAndRank(int node_id);

// "10.0.0.2:40123"; without a port of a worker, which listens nowhere.
std::string AddressOf(const Node& node);

// "worker 1 (10.0.0.3)", "server 0 (10.0.0.2:40123)"
std::string Describe(const Node& node);

}  // namespace ps
#endif  // BYTEPS_NET_LINK_NODE_TEXT_H_
