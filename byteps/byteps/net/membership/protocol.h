// What a scheduler and its nodes must agree on, beside the commands (commands.h).
#ifndef BYTEPS_NET_MEMBERSHIP_PROTOCOL_H_
#define BYTEPS_NET_MEMBERSHIP_PROTOCOL_H_

#include <string>

namespace ps {
namespace membership {

constexpr int kProtocol = 6;
// How a REFUSED begins whose receiver may come again.
constexpr char kAgain[] = "again: ";
// And one whose receiver asked, and would be admitted.
constexpr char kWould[] = "would: ";
// How long after its connection closed the scheduler's last word may still come, or its
// word on a peer whose connection broke.
constexpr double kLastWordSeconds = 0.5;

// What the scheduler says of the slowest worker's link: "link=25000", in Mbit/s.
std::string PackLink(int mbps);
// 0 for anything else.
int ParseLink(const std::string& text);

}  // namespace membership
}  // namespace ps
#endif  // BYTEPS_NET_MEMBERSHIP_PROTOCOL_H_
