// Errors about rounds, as members get them.
#ifndef BYTEPS_SERVER_ROUND_ERRORS_H_
#define BYTEPS_SERVER_ROUND_ERRORS_H_

#include <cstdint>
#include <string>

#include "byteps/server/partition.h"
#include "byteps/server/round.h"

namespace byteps {
namespace core {

// Returns the limit of the rounds that a partition keeps. A worker pushes less than MostRoundsOpen
// rounds ahead of its own oldest open round. After a server was lost, a member may have answers
// that another one does not have. So the oldest round on the server may be MostRoundsOpen rounds
// older still.
uint32_t MostRoundsKept(const Declaration& declaration);

// Returns the error for a push of a round that this server no longer has, or cannot begin yet.
std::string OutOfReach(const Partition& partition, int rank, uint32_t number);

// Returns the error of a round that is past its deadline.
std::string TimedOut(const Partition& partition, const Round& round, Round::Clock::time_point as_of,
                     Round::Clock::time_point grace_until, Round::Clock::duration stood_still);

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_SERVER_ROUND_ERRORS_H_
