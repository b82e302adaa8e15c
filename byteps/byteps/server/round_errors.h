// Errors about rounds, as sent to members.
#ifndef BYTEPS_SERVER_ROUND_ERRORS_H_
#define BYTEPS_SERVER_ROUND_ERRORS_H_

#include <cstdint>
#include <string>

#include "byteps/server/partition.h"
#include "byteps/server/round.h"

namespace byteps {
namespace core {

// Returns the limit of the rounds that a partition keeps. A worker pushes less than MostRoundsOpen
// rounds ahead of its own oldest open round. After the loss of a server, a member may have answers
// that another member does not have; so the oldest round on the server may be another
// MostRoundsOpen rounds older.
uint32_t MostRoundsKept(const Declaration& declaration);

// Returns the error for a push of a round that this server no longer has, or cannot begin yet.
std::string OutOfReach(const Partition& partition, int rank, uint32_t number);

// Error of a round that is past its deadline.
std::string TimedOut(const Partition& partition, const Round& round, Round::Clock::time_point as_of,
                     Round::Clock::time_point grace_until, Round::Clock::duration stood_still);

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_SERVER_ROUND_ERRORS_H_
