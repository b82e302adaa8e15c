#include "byteps/net/tcp/frame_reader.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <numeric>
#include <string>
#include <utility>

#include "byteps/base/invariant.h"
#include "byteps/base/wire.h"
#include "byteps/net/link/admission.h"
#include "byteps/net/link/registration_cache.h"
#include "byteps/net/tcp/socket.h"
#include "byteps/net/tcp/stream.h"

namespace ps {
namespace tcp {

ssize_t FrameReader::Read(Stream* socket, bool* all) {
  iovec vector[2];
  int count = 0;
  // Values to be dropped are read into the buffer.
  const size_t missing =
      phase_ == Phase::kValues && place_ != nullptr ? place_bytes_ - place_done_ : 0;
  if (missing > 0) vector[count++] = {place_ + place_done_, missing};
  vector[count++] = buffer_.Room();
  const size_t room = missing + vector[count - 1].iov_len;
  const ssize_t n = socket->Read(vector, count);
  if (n <= 0) return n;
  *all = static_cast<size_t>(n) < room && !socket->encrypted();
  const size_t placed = std::min<size_t>(n, missing);
  place_done_ += placed;
  buffer_.Add(n - placed);
  BPS_INVARIANT("nothing is read beyond its place", place_done_ <= place_bytes_,
                std::to_string(place_done_) + " of " + std::to_string(place_bytes_) + " bytes");
  return n;
}

FrameReader::Step FrameReader::Next() {
  while (true) {
    switch (phase_) {
      case Phase::kHead:
        return ReadHead();
      case Phase::kMeta:
        if (!ReadMeta()) return Step::kMore;
        break;
      case Phase::kValues:
        return ReadValues() ? Step::kMessage : Step::kMore;
    }
  }
}

FrameReader::Step FrameReader::ReadHead() {
  const char* data = buffer_.Peek(kFrameHeaderBytes);
  if (data == nullptr) return Step::kMore;
  if (!DecodeFrameHeader(data, &header_)) throw Error("it sent what is no message");
  buffer_.Skip(kFrameHeaderBytes);
  frame_bytes_ = kFrameHeaderBytes;
  if (header_.type == kMessage) phase_ = Phase::kMeta;
  goodbye_ = goodbye_ || header_.type == kGoodbye;
  return Step::kHead;
}

bool FrameReader::ReadMeta() {
  const size_t sizes_bytes = header_.values * sizeof(uint64_t);
  const size_t bytes = sizes_bytes + header_.meta_bytes;
  const char* data = buffer_.Peek(bytes);
  if (data == nullptr) return false;
  ByteReader in(data, sizes_bytes);
  sizes_.resize(header_.values);
  for (uint64_t& size : sizes_) {
    in.Int(&size);
    if (size > kMaxValueBytes) throw Error("it sent a message of impossible size");
  }
  if (!DecodeMeta(data + sizes_bytes, header_.meta_bytes, &incoming_.meta)) {
    throw Error("it sent a message whose meta of " + std::to_string(header_.meta_bytes) +
                " bytes does not parse");
  }
  incoming_.meta.sender = sender_;
  buffer_.Skip(bytes);
  frame_bytes_ += bytes;
  buffer_.Shrink();
  drop_ = false;
  value_ = 0;
  phase_ = Phase::kValues;
  BeginValue();
  return true;
}

// Chooses the memory into which the next value is read.
void FrameReader::BeginValue() {
  place_ = nullptr;
  place_bytes_ = place_done_ = 0;
  if (value_ == sizes_.size()) return;
  place_bytes_ = sizes_[value_];
  SArray<char> values;
  if (place_bytes_ > 0) {
    const bool is_one_value = sizes_.size() == 1;
    const uint64_t all = std::accumulate(sizes_.begin(), sizes_.end(), uint64_t{0});
    char* const place = places_->PlaceFor(incoming_.meta, all);
    if (is_one_value || place == Nowhere()) place_ = place;
    if (place_ != nullptr && place_ != Nowhere()) {
      // The answer shows that the peer has received the request. So the request's memory is free,
      // and the answer may overwrite it.
      TakeBack(place_);
      values.reset(place_, place_bytes_, [](char*) {});
    }
  }
  if (place_bytes_ > 0 && place_ == nullptr) {
    try {
      values = pool_->Take(place_bytes_);
      place_ = values.data();
    } catch (const std::bad_alloc&) {
      place_ = Nowhere();  // the owner reports to which message the memory belonged
    }
  }
  if (place_ == Nowhere()) {
    incoming_.meta.data_size = static_cast<int>(place_bytes_);
    place_ = nullptr;
  }
  incoming_.data.push_back(values);
}

bool FrameReader::ReadValues() {
  while (value_ < sizes_.size()) {
    const size_t there =
        std::min(place_bytes_ - place_done_, buffer_.size());  // came with the meta
    if (there > 0) {
      if (place_ != nullptr) memcpy(place_ + place_done_, buffer_.data(), there);
      place_done_ += there;
      buffer_.Skip(there);
    }
    if (place_done_ < place_bytes_) return false;
    frame_bytes_ += place_bytes_;
    ++value_;
    BeginValue();
  }
  return true;
}

bool FrameReader::Take(Message* msg, size_t* bytes) {
  *msg = std::move(incoming_);
  incoming_ = Message();
  phase_ = Phase::kHead;
  *bytes = frame_bytes_;
  return !drop_;
}

Message FrameReader::Restart() {
  phase_ = Phase::kHead;
  place_ = nullptr;
  return std::exchange(incoming_, Message());
}

void FrameReader::Abandon(const void* begin, size_t bytes) {
  if (phase_ != Phase::kValues || place_ == nullptr) return;
  const char* first = static_cast<const char*>(begin);
  if (place_ >= first + bytes || place_ + place_bytes_ <= first) return;
  SArray<char> elsewhere = pool_->Take(place_bytes_);
  place_ = elsewhere.data();
  incoming_.data.back() = elsewhere;
  drop_ = true;
  PS_PROBE(kAbandoned);
  BPS_INVARIANT_NOTED("what is abandoned is not written to",
                      place_ >= first + bytes || place_ + place_bytes_ <= first,
                      std::to_string(place_bytes_) + " bytes are read into it");
}

}  // namespace tcp
}  // namespace ps
