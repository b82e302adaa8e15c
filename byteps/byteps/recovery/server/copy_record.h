#ifndef BYTEPS_RECOVERY_SERVER_COPY_RECORD_H_
#define BYTEPS_RECOVERY_SERVER_COPY_RECORD_H_

#include <cstdint>
#include <string>

#include "byteps/base/protocol.h"

namespace byteps {
namespace core {

// A record by which a server tells its backup about one partition (docs/design/losses.md).
//
// Follows a COPY's key; its values are those of the state or of the round.
struct CopyRecord {
  enum What : uint8_t {
    kStep,      // no more than `settled`
    kState,     // slots of the state, and perhaps the last round
    kRound,     // a round whose gradients are summed
    kBegin,     // of no partition: what the backup has is of no use, all follows
    kComplete,  // all has been told
    kFreed,     // no member holds the tensor any more
  };

  uint64_t pass = 0;  // that the backup gave the sender
  What what = kStep;
  // The packed UpdateStep that was made of the last round, or dropped (UpdateStep::skip), and the
  // round's number; "": nothing new.
  std::string settled;
  uint32_t round = 0;
  uint32_t rank = 0;  // of a member that asked for what is told
  std::string lacks;  // PackMembers of those that the sum of the round lacks
  // kState.  The packed list of its one declaration; a bit per slot whose values follow, in order;
  // whether it is all of the state; and then the last round (RoundUpdate::Pack), whose sum comes
  // behind the slots.  "": there was none.
  std::string declaration;
  uint32_t slots = 0;
  bool is_all = false;
  std::string last;
  // kRound: what the first member asked for.
  uint8_t op = 0;
  std::string step;

  std::string Pack() const;
  // False: `text` is no record.  Whether the rest fits the declaration is not looked at.
  static bool Unpack(const std::string& text, CopyRecord* record);
};

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_RECOVERY_SERVER_COPY_RECORD_H_
