// Upstream's logging, BPS_LOG(severity) << ..., for this namespace.
#ifndef BYTEPS_CORE_LOG_H_
#define BYTEPS_CORE_LOG_H_

#include "../common/logging.h"

namespace byteps {
namespace core {

using common::LogLevel;
using common::LogMessage;

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_CORE_LOG_H_
