// The meta of a message as it lies on the wire, by whatever transport.
//
// What identifies sender and receiver is not in it: a connection knows its ends.
#ifndef BYTEPS_NET_LINK_META_CODEC_H_
#define BYTEPS_NET_LINK_META_CODEC_H_

#include <cstddef>
#include <string>

#include "ps/internal/message.h"

namespace ps {

// Longer ones are refused when they come.  The names of some hundred thousand nodes fit.
constexpr size_t kMaxMetaBytes = 64 << 20;

std::string EncodeMeta(const Meta& meta);

// False when the bytes are no meta of this version: too few or too many, or a value that
// means nothing here.  `meta` is undefined then.
bool DecodeMeta(const char* data, size_t size, Meta* meta);

}  // namespace ps
#endif  // BYTEPS_NET_LINK_META_CODEC_H_
