// Errors about rounds, as members are answered.
#ifndef BYTEPS_SERVER_ROUND_ERRORS_H_
#define BYTEPS_SERVER_ROUND_ERRORS_H_

#include <cstdint>
#include <string>

#include "byteps/server/partition.h"
#include "byteps/server/round.h"

namespace byteps {
namespace core {

// Rounds that are kept of a tensor.  A worker holds back what would be more than MostRoundsOpen
// ahead of the oldest round that has not ended there.  The oldest one here may be older by as many:
// where a server was lost, one member may have had the answers that another one lacks.
uint32_t MostRoundsKept(const Declaration& declaration);

// Why a push of this number comes to no round.
std::string OutOfReach(const Partition& partition, int rank, uint32_t number);

// Why a round fails whose time is over.
std::string TimedOut(const Partition& partition, const Round& round, Round::Clock::time_point as_of,
                     Round::Clock::time_point grace_until, Round::Clock::duration stood_still);

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_SERVER_ROUND_ERRORS_H_
