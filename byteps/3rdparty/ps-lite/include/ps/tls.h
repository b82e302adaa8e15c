// Whether and how the connections of a job are encrypted; see src/tls/tls.h.
#ifndef PS_TLS_H_
#define PS_TLS_H_

#include "ps/auth.h"

namespace ps {
namespace tls {

// Throws dmlc::Error that says what is wrong with BYTEPS_TLS and BYTEPS_TLS_*, or with the files
// that they name.
void CheckSettings(const auth::Secret& secret);

}  // namespace tls
}  // namespace ps
#endif  // PS_TLS_H_
