#ifndef BYTEPS_SERVER_REQUEST_FORM_H_
#define BYTEPS_SERVER_REQUEST_FORM_H_

#include <cstdint>
#include <optional>

#include "byteps/base/protocol.h"
#include "byteps/cluster/channel.h"

namespace byteps {
namespace core {

// Checks the form of a request about a partition against the declaration of its tensor.

// Bytes of values that a request of this operation has; none of an operation that is not the
// tensor's.
std::optional<uint64_t> ValueBytes(int op, const Declaration& declaration, uint64_t index);

// Whether the values and the header are those that `declaration` lets it have.
bool HasForm(const Message& message, const Declaration& declaration, uint64_t index);

}  // namespace core
}  // namespace byteps

#endif  // BYTEPS_SERVER_REQUEST_FORM_H_
