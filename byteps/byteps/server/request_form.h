#ifndef BYTEPS_SERVER_REQUEST_FORM_H_
#define BYTEPS_SERVER_REQUEST_FORM_H_

#include <cstdint>
#include <optional>

#include "byteps/base/protocol.h"
#include "byteps/cluster/channel.h"

namespace byteps {
namespace core {

// Checks requests about a partition against the declaration of the tensor.

// Returns the number of bytes of values in a request of this op. Returns nothing if the op is not
// valid for the tensor.
std::optional<uint64_t> ValueBytes(int op, const Declaration& declaration, uint64_t index);

// Returns whether the values and the header of a request fit the declaration.
bool HasForm(const Message& message, const Declaration& declaration, uint64_t index);

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_SERVER_REQUEST_FORM_H_
