// Upstream's logging, BPS_LOG(severity) << ..., for our namespaces.
#ifndef BYTEPS_BASE_LOG_H_
#define BYTEPS_BASE_LOG_H_

#include "byteps/common/logging.h"

namespace byteps {
namespace core {

using common::LogLevel;
using common::LogMessage;

// What is logged where BYTEPS_LOG_LEVEL does not say; without this call: WARNING.  To be called
// before anything is logged.
void SetDefaultLogLevel(LogLevel level);

}  // namespace core
}  // namespace byteps

namespace ps {
using byteps::common::LogLevel;
using byteps::common::LogMessage;
}  // namespace ps
#endif  // BYTEPS_BASE_LOG_H_
