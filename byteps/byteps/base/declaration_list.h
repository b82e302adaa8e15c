// Many declarations in one message.
//
// On the wire, all numbers little-endian:
//   u8  version, 5                     u8  BYTEPS_KEY_HASH_FN (KeyHash)
//   u32 groups, each:                  u32 members, then u32 a rank, ascending
//   u32 tensors, each:                 u8  dtype     u8  flags: 1 = average, 2 = has a rule,
//                                                    4 = feedback, 8 = rounded by chance
//                                      u64 bytes     u32 partition bytes   u64 placement
//                                      u32 group, an index into the groups above
//                                      u32 length of the name, then the name
//                                      where it has a rule: u32 its length, then the UpdateRule
#ifndef BYTEPS_BASE_DECLARATION_LIST_H_
#define BYTEPS_BASE_DECLARATION_LIST_H_

#include <string>
#include <vector>

#include "byteps/base/protocol.h"

namespace byteps {
namespace core {

constexpr uint8_t kDeclarationVersion = 6;

// Declarations that were made with one configuration: `hash` is the same in all.
std::string PackDeclarations(const std::vector<Declaration>& declarations);

// False when `text` is no list of declarations; *error then says why.  Every count and length is
// checked, so that any bytes may be given.
bool UnpackDeclarations(const std::string& text, std::vector<Declaration>* declarations,
                        std::string* error);

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_BASE_DECLARATION_LIST_H_
