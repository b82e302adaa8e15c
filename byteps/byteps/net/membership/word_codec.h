// Encodes messages of the membership as bytes: a struct as its fields in order, a variant as its
// index and then its value. A struct that is sent has a function Fields, which ties its fields. It
// may have a function IsValid, which checks a received struct.
#ifndef BYTEPS_NET_MEMBERSHIP_WORD_CODEC_H_
#define BYTEPS_NET_MEMBERSHIP_WORD_CODEC_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "byteps/base/wire.h"

namespace ps {
namespace membership {

template <typename T>
bool IsValid(const T& /*word*/) {
  return true;
}

template <typename T>
concept IsWordList = requires(T list) { list.insert(list.end(), *list.begin()); };

template <typename T>
struct IsVariant : std::false_type {};
template <typename... T>
struct IsVariant<std::variant<T...>> : std::true_type {};

template <typename T>
void Put(const T& value, byteps::core::WireWriter* out) {
  if constexpr (std::is_integral_v<T>) {
    out->Put(
        static_cast<std::make_unsigned_t<std::conditional_t<std::is_same_v<T, bool>, char, T>>>(
            value));
  } else if constexpr (std::is_same_v<T, std::string>) {
    out->PutText(value);
  } else if constexpr (IsVariant<T>::value) {
    out->Put(static_cast<uint8_t>(value.index()));
    std::visit([out](const auto& word) { Put(word, out); }, value);
  } else if constexpr (IsWordList<T>) {
    out->PutSize(value.size());
    for (const auto& element : value) Put(element, out);
  } else if constexpr (requires { value.first; }) {  // element of a map
    Put(value.first, out);
    Put(value.second, out);
  } else {
    std::apply([out](const auto&... field) { (Put(field, out), ...); },
               Fields(const_cast<T&>(value)));
  }
}

template <typename T>
bool Get(byteps::core::WireReader* in, T* value);

template <typename... T, size_t... I>
bool GetVariant(byteps::core::WireReader* in, std::variant<T...>* value,
                std::index_sequence<I...> /*all*/) {
  const uint8_t index = in->Get<uint8_t>();
  return ((index == I && Get(in, &value->template emplace<I>())) || ...);
}

template <typename T>
bool Get(byteps::core::WireReader* in, T* value) {
  if constexpr (std::is_same_v<T, bool>) {
    *value = in->Get<uint8_t>() != 0;
  } else if constexpr (std::is_integral_v<T>) {
    *value = static_cast<T>(in->Get<std::make_unsigned_t<T>>());
  } else if constexpr (std::is_same_v<T, std::string>) {
    *value = in->GetText();
  } else if constexpr (IsVariant<T>::value) {
    if (!GetVariant(in, value, std::make_index_sequence<std::variant_size_v<T>>())) return false;
  } else if constexpr (IsWordList<T>) {
    const uint32_t count = in->GetCount(1);
    for (uint32_t i = 0; i < count && in->ok(); ++i) {
      if constexpr (requires { typename T::mapped_type; }) {
        std::pair<typename T::key_type, typename T::mapped_type> element{};
        Get(in, &element.first);
        Get(in, &element.second);
        value->insert(element);
      } else {
        typename T::value_type element{};
        Get(in, &element);
        value->insert(value->end(), element);
      }
    }
  } else {
    const bool read =
        std::apply([in](auto&... field) { return (Get(in, &field) && ...); }, Fields(*value));
    return read && in->ok() && IsValid(*value);
  }
  return in->ok();
}

template <typename T>
std::string Pack(const T& word) {
  byteps::core::WireWriter out;
  Put(word, &out);
  return out.Take();
}

// Returns the message, or nullopt if the bytes are not a message of type T.
template <typename T>
std::optional<T> Parse(const std::string& bytes) {
  byteps::core::WireReader in(bytes);
  T word{};
  if (!Get(&in, &word) || !in.at_end()) return std::nullopt;
  return word;
}

}  // namespace membership
}  // namespace ps
#endif  // BYTEPS_NET_MEMBERSHIP_WORD_CODEC_H_
