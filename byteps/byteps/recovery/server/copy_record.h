#ifndef BYTEPS_RECOVERY_SERVER_COPY_RECORD_H_
#define BYTEPS_RECOVERY_SERVER_COPY_RECORD_H_

#include <cstdint>
#include <string>

#include "byteps/base/protocol.h"

namespace byteps {
namespace core {

// Record about one partition, from a server to its backup (docs/design/losses.md).
//
// A record is the body of a COPY or FETCHED message, whose values are the state's or the round's.
struct CopyRecord {
  enum What : uint8_t {
    kStep,      // only `settled`
    kState,     // slots of the state, and the last round if there is one
    kRound,     // a round whose gradients are summed
    kBegin,     // about no partition: the backup drops its copy, everything follows
    kComplete,  // everything was sent
    kFreed,     // all members have released the tensor
  };

  uint64_t token = 0;  // token that the backup gave to the sender
  What what = kStep;
  // Packed UpdateStep that the server made or skipped (UpdateStep::skip) in round `round`. "" if
  // the backup already knows the outcome.
  std::string settled;
  uint32_t round = 0;
  uint32_t rank = 0;  // member that asked for the step
  std::string lacks;  // PackMembers of members missing in the round's sum
  // Set for kState. `declaration`: a packed list with one element. `slots`: one bit for each slot
  // whose values follow, in this order. `is_all`: these slots are the whole state. `last`: the last
  // round (RoundUpdate::Pack), whose sum follows the slots; "" if there is none.
  std::string declaration;
  uint32_t slots = 0;
  bool is_all = false;
  std::string last;
  // Set for kRound: op and step of the first member's request.
  uint8_t op = 0;
  std::string step;

  std::string Pack() const;
  // Returns false if `text` is no record. Does not check that it fits the declaration.
  static bool Unpack(const std::string& text, CopyRecord* record);
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_RECOVERY_SERVER_COPY_RECORD_H_
