#include "byteps/net/tcp/read_buffer.h"

#include <cstring>
#include <string>

#include "byteps/base/invariant.h"

namespace ps {
namespace tcp {

const char* ReadBuffer::Peek(size_t bytes) {
  if (size() >= bytes) return data();
  Need(bytes);
  return nullptr;
}

// Makes room for `bytes` bytes after begin_.
void ReadBuffer::Need(size_t bytes) {
  if (begin_ > 0) {
    memmove(bytes_.data(), bytes_.data() + begin_, end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
  }
  if (bytes_.size() < bytes) bytes_.resize(bytes);
}

void ReadBuffer::Shrink() {
  if (bytes_.size() <= kBytes || size() > kBytes) return;
  Need(0);
  bytes_.resize(kBytes);
  bytes_.shrink_to_fit();
}

iovec ReadBuffer::Room() {
  if (begin_ == end_) begin_ = end_ = 0;
  return {bytes_.data() + end_, bytes_.size() - end_};
}

void ReadBuffer::Add(size_t bytes) {
  end_ += bytes;
  BPS_INVARIANT("nothing is read beyond its place", end_ <= bytes_.size(),
                std::to_string(end_) + " bytes of " + std::to_string(bytes_.size()));
}

}  // namespace tcp
}  // namespace ps
