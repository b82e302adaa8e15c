// Words and numbers that both parts of the membership use.
#ifndef BYTEPS_NET_MEMBERSHIP_TEXT_H_
#define BYTEPS_NET_MEMBERSHIP_TEXT_H_

#include <chrono>
#include <string>

#include "ps/internal/message.h"

namespace ps {
namespace membership {

constexpr int kProtocol = 5;
// How a REFUSED begins whose receiver may come again.
constexpr char kAgain[] = "again: ";
// And one whose receiver asked, and would be admitted.
constexpr char kWould[] = "would: ";
// How long after its connection closed the scheduler's last word may still come, or its
// word on a peer whose connection broke.
constexpr double kLastWordSeconds = 0.5;
// Ids of nodes that are refused: far from those that are admitted.
constexpr int kRefusedBase = 1 << 24;

std::chrono::steady_clock::duration ToDuration(double seconds);

// "30.0 s (BYTEPS_PEER_TIMEOUT_S=30)"
std::string Limit(double seconds, const char* variable);

// "1 worker", "2 workers"
std::string Plural(int n, const char* noun);

// What the scheduler says of the slowest worker's link: "link=25000", in Mbit/s.
std::string PackLink(int mbps);
// 0 for anything else.
int ParseLink(const std::string& text);

// "worker 1", from a node id
std::string RoleAndRank(int node_id);

// "worker 1 (10.0.0.3)", "server 0 (10.0.0.2:40123)"
std::string Describe(const Node& node);

}  // namespace membership
}  // namespace ps
#endif  // BYTEPS_NET_MEMBERSHIP_TEXT_H_
