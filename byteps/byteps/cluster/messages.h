// What a channel carries: the requests of workers and the answers of servers (base/protocol.h).
#ifndef BYTEPS_CLUSTER_MESSAGES_H_
#define BYTEPS_CLUSTER_MESSAGES_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "ps/internal/message.h"

namespace byteps {
namespace core {

// A request of a worker (`op` is an Op), and the answer to it, without values.
// `number` is what the worker calls the request; an answer with an `error` says that
// it failed.
ps::Message MakeRequest(int op, int receiver, uint64_t key, uint64_t number, std::string body);
ps::Message MakeAnswer(int op, int receiver, uint64_t key, uint64_t number,
                       const std::string& error);
void AddValues(ps::Message* msg, const ps::SArray<char>& values);
// Memory for so many bytes of values, not initialised.  Throws OutOfMemory.
ps::SArray<char> RoomForValues(size_t bytes);

}  // namespace core
}  // namespace byteps
#endif  // BYTEPS_CLUSTER_MESSAGES_H_
